(* Finite sums of real numbers over lists, and which subset weighs least. The other files rest on it; no theorem of the
   paper is here. *)

From Coq Require Import Reals List Lra Lia Permutation.
Import ListNotations.
Local Open Scope R_scope.

Definition sum {T : Type} (f : T -> R) (l : list T) : R := fold_right (fun x rest => f x + rest) 0 l.

Notation "'Σ' x '∈' l , e" := (sum (fun x => e) l)
  (at level 45, x name, l at level 40, e at level 40, format "'Σ'  x  '∈'  l ,  e").

(* Whether a token is in a list, as a computation. *)
Definition member (j : nat) (l : list nat) : bool := existsb (Nat.eqb j) l.

Lemma member_iff_in : forall j l, member j l = true <-> In j l.
Proof.
  intros j l. unfold member. rewrite existsb_exists. split.
  - intros [k [k_in equal]]. apply Nat.eqb_eq in equal. now subst.
  - intros j_in. exists j. now rewrite Nat.eqb_refl.
Qed.

Lemma member_false_iff : forall j l, member j l = false <-> ~ In j l.
Proof. intros j l. rewrite <- member_iff_in. now destruct (member j l). Qed.

Lemma no_duplicates_in_beginning : forall {T : Type} (l m : list T), NoDup (l ++ m) -> NoDup l.
Proof.
  intros T l m once. induction l as [|x l IH]; [constructor |].
  simpl in once. apply NoDup_cons_iff in once. destruct once as [new once]. constructor; [|now apply IH].
  intros x_in. apply new, in_or_app. now left.
Qed.

Section AnySum.
Context {T : Type}.
Implicit Types (f g : T -> R) (l m : list T).

Lemma sum_app : forall f l m, sum f (l ++ m) = sum f l + sum f m.
Proof. intros f l m. induction l as [|x l IH]; simpl; [lra | rewrite IH; lra]. Qed.

Lemma sum_ext : forall f g l, (forall x, In x l -> f x = g x) -> sum f l = sum g l.
Proof.
  intros f g l. induction l as [|x l IH]; intros equal; simpl; [reflexivity |].
  rewrite (equal x), IH; auto with datatypes.
Qed.

Lemma sum_plus : forall f g l, (Σ x ∈ l, (f x + g x)) = (Σ x ∈ l, f x) + (Σ x ∈ l, g x).
Proof. intros f g l. induction l as [|x l IH]; simpl; [lra | rewrite IH; lra]. Qed.

Lemma sum_scaled : forall c f l, (Σ x ∈ l, c * f x) = c * (Σ x ∈ l, f x).
Proof. intros c f l. induction l as [|x l IH]; simpl; [lra | rewrite IH; lra]. Qed.

Lemma sum_constant : forall c l, (Σ x ∈ l, c) = INR (length l) * c.
Proof.
  intros c l. induction l as [|x l IH]; [simpl; lra |].
  change (length (x :: l)) with (S (length l)). rewrite S_INR. simpl sum. rewrite IH. lra.
Qed.

Lemma sum_le : forall f g l, (forall x, In x l -> f x <= g x) -> sum f l <= sum g l.
Proof.
  intros f g l. induction l as [|x l IH]; intros below; simpl; [lra |].
  apply Rplus_le_compat; auto with datatypes.
Qed.

Lemma sum_lt : forall f g l, l <> [] -> (forall x, In x l -> f x < g x) -> sum f l < sum g l.
Proof.
  intros f g [|x l] not_empty below; [contradiction |]. simpl.
  apply Rplus_lt_le_compat; [auto with datatypes |].
  apply sum_le. intros y y_in. apply Rlt_le. auto with datatypes.
Qed.

Lemma sum_nonnegative : forall f l, (forall x, In x l -> 0 <= f x) -> 0 <= sum f l.
Proof.
  intros f l nonnegative. replace 0 with (sum (fun _ : T => 0) l); [now apply sum_le |].
  rewrite sum_constant. lra.
Qed.

Lemma sum_permutation : forall f l m, Permutation l m -> sum f l = sum f m.
Proof. intros f l m same. induction same; simpl; lra. Qed.

Lemma sum_filter : forall f (p : T -> bool) l, sum f (filter p l) = sum (fun x => if p x then f x else 0) l.
Proof. intros f p l. induction l as [|x l IH]; simpl; [reflexivity |]. destruct (p x); simpl; lra. Qed.

Lemma sum_split : forall f (p : T -> bool) l,
  sum f l = sum f (filter p l) + sum f (filter (fun x => negb (p x)) l).
Proof. intros f p l. induction l as [|x l IH]; simpl; [lra |]. destruct (p x); simpl; lra. Qed.

Lemma length_split : forall (p : T -> bool) l,
  length l = (length (filter p l) + length (filter (fun x => negb (p x)) l))%nat.
Proof. intros p l. induction l as [|x l IH]; simpl; [lia |]. destruct (p x); simpl; lia. Qed.

(* Every value of the shorter list is below every value of the longer one. *)
Lemma sum_of_lower : forall f l m,
  (length l <= length m)%nat -> (forall y, In y m -> 0 <= f y) ->
  (forall x y, In x l -> In y m -> f x <= f y) -> sum f l <= sum f m.
Proof.
  intros f l. induction l as [|x l IH]; intros m shorter nonnegative below.
  - now apply sum_nonnegative.
  - destruct m as [|y m]; [simpl in shorter; lia |]. simpl.
    apply Rplus_le_compat; [auto with datatypes |].
    apply IH; [simpl in shorter; lia | auto with datatypes |].
    intros u v u_in v_in. apply below; now right.
Qed.

End AnySum.

Lemma sum_swap : forall {T U : Type} (f : T -> U -> R) (l : list T) (m : list U),
  (Σ x ∈ l, (Σ y ∈ m, f x y)) = (Σ y ∈ m, (Σ x ∈ l, f x y)).
Proof.
  intros T U f l m. induction l as [|x l IH]; simpl.
  - rewrite sum_constant. lra.
  - now rewrite IH, sum_plus.
Qed.

(* A set whose own tokens are not heavier than any token of another set that it lacks, and that has no more tokens than
   the other, weighs no more. *)
Lemma lightest_subset : forall (f : nat -> R) (light other : list nat),
  NoDup light -> NoDup other -> (length light <= length other)%nat ->
  (forall j, In j other -> 0 <= f j) ->
  (forall i j, In i light -> ~ In i other -> In j other -> ~ In j light -> f i <= f j) ->
  sum f light <= sum f other.
Proof.
  intros f light other light_once other_once fewer nonnegative below.
  set (in_other := fun j => member j other). set (in_light := fun j => member j light).
  assert (common : Permutation (filter in_other light) (filter in_light other)).
  { apply NoDup_Permutation; [now apply NoDup_filter | now apply NoDup_filter |].
    intros j. unfold in_other, in_light. rewrite !filter_In, !member_iff_in. tauto. }
  rewrite (sum_split f in_other light), (sum_split f in_light other), (sum_permutation f _ _ common).
  apply Rplus_le_compat_l, sum_of_lower.
  - pose proof (length_split in_other light). pose proof (length_split in_light other).
    pose proof (Permutation_length common). lia.
  - intros j j_in. apply filter_In in j_in. now apply nonnegative.
  - intros i j i_in j_in. apply filter_In in i_in, j_in.
    destruct i_in as [i_in i_not], j_in as [j_in j_not].
    unfold in_other in i_not. unfold in_light in j_not.
    rewrite Bool.negb_true_iff, member_false_iff in i_not, j_not. now apply below.
Qed.
