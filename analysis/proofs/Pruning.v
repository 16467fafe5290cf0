(* What pruning visual tokens in the prefill loses: equations (1) to (3) of the paper (arXiv 2602.02197), and a variant.

   a i j is the attention of the prompt's text row i to the visual token j (the mean over heads), A_j the sum over rows,
   A_V the sum of A_j over the visual tokens V. The paper evicts j when A_j < r A_V and max_i a_ij < α; a sink is always
   spared. We prove

   - DAP: what is evicted had less than |C| min (r A_V, α rows) of the attention in all rows together, less than |C| α in
     each, and less than the share ε of A_V when r <= ε / c and at most c tokens go;
   - mass: taking tokens in ascending order while their sum stays within ε A_V loses at most the share ε, and no set of
     tokens that spares the same sinks and loses at most that share has more tokens.

   Nothing here needs the attention's rows to add up to one. *)

From Coq Require Import Reals List Lra Lia Permutation.
From HAE Require Import Sums.
Import ListNotations.
Local Open Scope R_scope.

Definition less (x y : R) : bool := if Rlt_dec x y then true else false.
Definition at_most (x y : R) : bool := if Rle_dec x y then true else false.

Lemma less_iff : forall x y, less x y = true <-> x < y.
Proof. intros x y. unfold less. destruct (Rlt_dec x y); split; auto; discriminate. Qed.

Lemma at_most_iff : forall x y, at_most x y = true <-> x <= y.
Proof. intros x y. unfold at_most. destruct (Rle_dec x y); split; auto; discriminate. Qed.

(* Eq. (1): A_j, and the largest of the a_ij (0 without a row). *)
Definition received (rows : list nat) (a : nat -> nat -> R) (j : nat) : R := Σ i ∈ rows, a i j.
Definition largest (rows : list nat) (a : nat -> nat -> R) (j : nat) : R :=
  fold_right (fun i rest => Rmax (a i j) rest) 0 rows.

(* A sum of A_j over some tokens: A_V when it is over all candidates. *)
Definition mass (rows : list nat) (a : nat -> nat -> R) (tokens : list nat) : R := Σ j ∈ tokens, received rows a j.

(* Eqs. (2) and (3): both comparisons are strict. The threshold is r A_V. *)
Definition dap (rows : list nat) (a : nat -> nat -> R) (sink : nat -> bool) (threshold α : R) (V : list nat)
    : list nat :=
  filter (fun j => less (received rows a j) threshold && less (largest rows a j) α && negb (sink j))%bool V.

(* 1. Bounds of the paper's rule *)

Lemma largest_bounds : forall rows a i j, In i rows -> a i j <= largest rows a j.
Proof.
  intros rows a i j. induction rows as [|k rows IH]; intros i_in; [contradiction |]. simpl.
  destruct i_in as [-> | i_in]; [apply Rmax_l |].
  apply Rle_trans with (1 := IH i_in), Rmax_r.
Qed.

Lemma dap_is_below : forall rows a sink threshold α V j, In j (dap rows a sink threshold α V) ->
  received rows a j < threshold /\ (forall i, In i rows -> a i j < α).
Proof.
  intros rows a sink threshold α V j j_in. apply filter_In in j_in. destruct j_in as [_ below].
  apply andb_prop in below. destruct below as [below _]. apply andb_prop in below.
  rewrite !less_iff in below. split; [tauto |]. intros i i_in.
  apply Rle_lt_trans with (largest rows a j); [now apply largest_bounds | tauto].
Qed.

(* C may be all that the rule evicts or, with an upper limit on evictions, a part of it. A_V may be any number: the sum
   over all candidates or over those of one picture. *)
Theorem DAP_column_bound :
  forall (rows : list nat) (a : nat -> nat -> R) (sink : nat -> bool) (r A_V α : R) (V C : list nat)
    (evicted_by_rule : incl C (dap rows a sink (r * A_V) α V))
    (something_evicted : C <> []) (rows_positive : (1 <= length rows)%nat),
  mass rows a C < INR (length C) * Rmin (r * A_V) (α * INR (length rows)).
Proof.
  intros. unfold mass. rewrite <- sum_constant. apply sum_lt; [assumption |]. intros j j_in.
  destruct (dap_is_below _ _ _ _ _ _ _ (evicted_by_rule j j_in)) as [below_share below_α].
  apply Rmin_glb_lt; [assumption |]. rewrite Rmult_comm, <- sum_constant. apply sum_lt; [|assumption].
  intros empty. rewrite empty in rows_positive. simpl in rows_positive. lia.
Qed.

(* Without a text row the bound is false: nothing received is not less than nothing. *)
Theorem DAP_column_bound_needs_a_row :
  let rows := [] in let a := fun _ _ => 0 in let C := dap rows a (fun _ => false) (1 * 1) 1 [0%nat] in
  C = [0%nat] /\ ~ mass rows a C < INR (length C) * Rmin (1 * 1) (1 * INR (length rows)).
Proof.
  assert (dap [] (fun _ _ => 0) (fun _ => false) (1 * 1) 1 [0%nat] = [0%nat]) as evicted.
  { unfold dap, less, received, largest. simpl.
    destruct (Rlt_dec 0 (1 * 1)); [|lra]. destruct (Rlt_dec 0 1); [reflexivity | lra]. }
  cbv zeta. rewrite evicted. split; [reflexivity |]. unfold mass, received. simpl.
  rewrite Rmin_right by lra. lra.
Qed.

(* In that counterexample A_V is no sum over the same rows. Where it is one, nothing is below a share of it without a
   row, so that an evicted token implies the hypothesis. *)
Theorem DAP_evicts_nothing_without_a_row :
  forall (a : nat -> nat -> R) (sink : nat -> bool) (r α : R) (V : list nat),
  dap [] a sink (r * mass [] a V) α V = [].
Proof.
  intros. destruct (dap [] a sink (r * mass [] a V) α V) as [|j C] eqn:evicted; [reflexivity | exfalso].
  destruct (dap_is_below [] a sink (r * mass [] a V) α V j) as [below _]; [rewrite evicted; now left |].
  unfold mass in below. rewrite (sum_ext _ (fun _ => 0)) in below by reflexivity.
  rewrite sum_constant in below. unfold received in below. simpl in below. lra.
Qed.

(* In any one text row. *)
Theorem DAP_row_bound :
  forall (rows : list nat) (a : nat -> nat -> R) (sink : nat -> bool) (threshold α : R) (V C : list nat) (i : nat)
    (evicted_by_rule : incl C (dap rows a sink threshold α V))
    (something_evicted : C <> []) (row_is_text : In i rows),
  (Σ j ∈ C, a i j) < INR (length C) * α.
Proof.
  intros. rewrite <- sum_constant. apply sum_lt; [assumption |]. intros j j_in.
  destruct (dap_is_below _ _ _ _ _ _ _ (evicted_by_rule j j_in)) as [_ below]. now apply below.
Qed.

(* The lost share of A_V. *)
Theorem DAP_share :
  forall (rows : list nat) (a : nat -> nat -> R) (sink : nat -> bool) (r ε α : R) (c : nat) (V C : list nat)
    (evicted_by_rule : incl C (dap rows a sink (r * mass rows a V) α V))
    (evictions_at_most : (length C <= c)%nat) (limit_positive : (1 <= c)%nat)
    (share_within : r <= ε / INR c) (loss_positive : 0 < ε) (mass_positive : 0 < mass rows a V),
  mass rows a C / mass rows a V < ε.
Proof.
  intros. set (A_V := mass rows a V) in *. apply le_INR in limit_positive. simpl in limit_positive.
  apply (Rmult_lt_reg_r A_V); [assumption |].
  replace (mass rows a C / A_V * A_V) with (mass rows a C) by (field; lra).
  destruct C as [|first rest] eqn:C_is; [unfold mass; simpl; now apply Rmult_lt_0_compat |]. rewrite <- C_is in *.
  apply Rlt_le_trans with (INR (length C) * (ε / INR c * A_V)).
  - unfold mass at 1. rewrite <- sum_constant. apply sum_lt; [rewrite C_is; discriminate |]. intros j j_in.
    destruct (dap_is_below _ _ _ _ _ _ _ (evicted_by_rule j j_in)) as [below _].
    apply Rlt_le_trans with (1 := below). apply Rmult_le_compat_r; lra.
  - assert (0 < ε / INR c * A_V) by (apply Rmult_lt_0_compat; [apply Rdiv_lt_0_compat |]; lra).
    apply Rle_trans with (INR c * (ε / INR c * A_V)).
    + apply Rmult_le_compat_r; [lra | now apply le_INR].
    + right. field. lra.
Qed.

(* Two rows, one token each threshold would let go: the hypotheses can be met together. *)
Theorem DAP_can_evict :
  let a := fun _ j => if Nat.eqb j 0 then 1 / 1000 else 1 / 2 in
  dap [0%nat; 1%nat] a (fun _ => false) (1 / 100 * mass [0%nat; 1%nat] a [0%nat; 1%nat]) (1 / 100) [0%nat; 1%nat]
    = [0%nat].
Proof.
  cbv zeta. unfold dap, mass, received, largest, less. simpl. unfold Rmax.
  repeat (destruct (Rle_dec _ _); try lra); repeat (destruct (Rlt_dec _ _); try lra); reflexivity.
Qed.

(* 2. The rule by mass *)

(* The order of evictions: the lower A_j first, and of equal ones the older token. *)
Definition goes_before (A : nat -> R) (i j : nat) : bool := (less (A i) (A j) || at_most (A i) (A j) && (i <=? j))%bool.

Fixpoint insert (A : nat -> R) (j : nat) (sorted : list nat) : list nat :=
  match sorted with
  | [] => [j]
  | k :: rest => if goes_before A j k then j :: sorted else k :: insert A j rest
  end.

Definition ascending (A : nat -> R) (tokens : list nat) : list nat := fold_right (insert A) [] tokens.

(* The longest beginning of a list whose running sums, from `lost` on, stay within `allowed`. *)
Fixpoint while_within (A : nat -> R) (lost allowed : R) (order : list nat) : list nat :=
  match order with
  | [] => []
  | j :: rest => if at_most (lost + A j) allowed then j :: while_within A (lost + A j) allowed rest else []
  end.

(* Spared tokens, such as the sinks, are skipped and add nothing to the running sum. *)
Definition by_mass (rows : list nat) (a : nat -> nat -> R) (spared : nat -> bool) (ε : R) (V : list nat) : list nat :=
  while_within (received rows a) 0 (ε * mass rows a V)
    (ascending (received rows a) (filter (fun j => negb (spared j)) V)).

Lemma insert_permutation : forall A j sorted, Permutation (j :: sorted) (insert A j sorted).
Proof.
  intros A j sorted. induction sorted as [|k rest IH]; simpl; [reflexivity |].
  destruct (goes_before A j k); [reflexivity |]. rewrite perm_swap. now apply perm_skip.
Qed.

Lemma ascending_permutation : forall A tokens, Permutation tokens (ascending A tokens).
Proof.
  intros A tokens. induction tokens as [|j tokens IH]; simpl; [reflexivity |].
  rewrite <- insert_permutation. now apply perm_skip.
Qed.

(* Every value of a list is at most the later ones. *)
Fixpoint rises (A : nat -> R) (tokens : list nat) : Prop :=
  match tokens with
  | [] => True
  | j :: rest => (forall k, In k rest -> A j <= A k) /\ rises A rest
  end.

Lemma goes_before_is_at_most : forall A i j, goes_before A i j = true -> A i <= A j.
Proof.
  intros A i j before. unfold goes_before in before. apply Bool.orb_prop in before.
  destruct before as [before | before]; [apply less_iff in before; lra |].
  apply andb_prop in before. now apply at_most_iff.
Qed.

Lemma not_before_is_at_least : forall A i j, goes_before A i j = false -> A j <= A i.
Proof.
  intros A i j before. unfold goes_before in before. apply Bool.orb_false_elim in before.
  destruct before as [before _]. unfold less in before. destruct (Rlt_dec (A i) (A j)); [discriminate | lra].
Qed.

Lemma insert_rises : forall A j sorted, rises A sorted -> rises A (insert A j sorted).
Proof.
  intros A j sorted. induction sorted as [|k rest IH]; simpl; [tauto |]. intros [k_lowest rest_rises].
  destruct (goes_before A j k) eqn:before; simpl.
  - apply goes_before_is_at_most in before. split; [|tauto]. intros i [<- | i_in]; [assumption |].
    apply Rle_trans with (1 := before). now apply k_lowest.
  - apply not_before_is_at_least in before. split; [|now apply IH]. intros i i_in.
    apply (Permutation_in _ (Permutation_sym (insert_permutation A j rest))) in i_in.
    destruct i_in as [<- | i_in]; [assumption | now apply k_lowest].
Qed.

Lemma ascending_rises : forall A tokens, rises A (ascending A tokens).
Proof. intros A tokens. induction tokens as [|j tokens IH]; simpl; [exact I | now apply insert_rises]. Qed.

(* What is taken is a beginning of the order, within what is allowed; the next token would exceed it. *)
Lemma while_within_spec : forall A lost allowed order, lost <= allowed ->
  let taken := while_within A lost allowed order in
  lost + (Σ j ∈ taken, A j) <= allowed /\
  exists rest, order = taken ++ rest /\
    match rest with [] => True | next :: _ => allowed < lost + (Σ j ∈ taken, A j) + A next end.
Proof.
  intros A lost allowed order. revert lost. induction order as [|j order IH]; intros lost within; simpl.
  - split; [lra |]. now exists [].
  - unfold at_most. destruct (Rle_dec (lost + A j) allowed) as [fits | exceeds]; simpl.
    + destruct (IH (lost + A j) fits) as [below [rest [order_is next]]]. split; [lra |].
      exists rest. split; [now rewrite order_is at 1 |]. destruct rest; [exact I | lra].
    + split; [lra |]. exists (j :: order). split; [reflexivity | lra].
Qed.

Lemma rises_app : forall A l m i j, rises A (l ++ m) -> In i l -> In j m -> A i <= A j.
Proof.
  intros A l m i j. induction l as [|k l IH]; simpl; [tauto |]. intros [lowest rest] [<- | i_in] j_in.
  - apply lowest, in_or_app. now right.
  - now apply IH.
Qed.

Theorem mass_guarantee :
  forall (rows : list nat) (a : nat -> nat -> R) (spared : nat -> bool) (ε : R) (V : list nat)
    (share_nonnegative : 0 <= ε) (mass_positive : 0 < mass rows a V),
  mass rows a (by_mass rows a spared ε V) / mass rows a V <= ε.
Proof.
  intros. set (A_V := mass rows a V) in *. apply (Rmult_le_reg_r A_V); [assumption |].
  replace (mass rows a (by_mass rows a spared ε V) / A_V * A_V) with (mass rows a (by_mass rows a spared ε V))
    by (field; lra).
  destruct (while_within_spec (received rows a) 0 (ε * A_V)
    (ascending (received rows a) (filter (fun j => negb (spared j)) V))) as [within _];
    [apply Rmult_le_pos; lra |].
  unfold mass at 1, by_mass. fold A_V. lra.
Qed.

(* Whatever other set of candidates without the spared tokens loses at most the share ε: it has no more tokens. *)
Theorem mass_optimal :
  forall (rows : list nat) (a : nat -> nat -> R) (spared : nat -> bool) (ε : R) (V other : list nat)
    (attention_nonnegative : forall i j, 0 <= a i j)
    (share_nonnegative : 0 <= ε) (mass_positive : 0 < mass rows a V) (candidates_once : NoDup V)
    (other_once : NoDup other) (other_are_candidates : incl other V)
    (other_spares_the_same : forall j, In j other -> spared j = false)
    (other_within_share : mass rows a other / mass rows a V <= ε),
  (length other <= length (by_mass rows a spared ε V))%nat.
Proof.
  intros. set (A_V := mass rows a V) in *. set (A := received rows a).
  assert (forall j, 0 <= A j) as A_nonnegative by (intros j; apply sum_nonnegative; auto).
  set (evictable := filter (fun j => negb (spared j)) V).
  assert (incl other evictable) as other_evictable.
  { intros j j_in. apply filter_In. split; [now apply other_are_candidates |].
    now rewrite other_spares_the_same. }
  destruct (while_within_spec A 0 (ε * A_V) (ascending A evictable)) as [_ [rest [order_is next]]];
    [apply Rmult_le_pos; lra |].
  set (taken := while_within A 0 (ε * A_V) (ascending A evictable)) in *.
  change (by_mass rows a spared ε V) with taken.
  assert (Permutation evictable (taken ++ rest)) as split by (rewrite <- order_is; apply ascending_permutation).
  destruct (le_lt_dec (length other) (length taken)) as [|more]; [assumption | exfalso].
  destruct rest as [|following rest].
  - (* Everything evictable was taken. *)
    rewrite app_nil_r in split. rewrite <- (Permutation_length split) in more.
    pose proof (NoDup_incl_length other_once other_evictable). lia.
  - (* One token more weighs at least as much as the taken ones and the next. *)
    assert (sum A (taken ++ [following]) <= sum A other) as lightest.
    { assert (NoDup (taken ++ following :: rest)) as order_once.
      { apply (Permutation_NoDup split), NoDup_filter, candidates_once. }
      apply lightest_subset; [| assumption | rewrite app_length; simpl; lia | auto |].
      - apply (no_duplicates_in_beginning _ rest). now rewrite <- app_assoc.
      - intros i j i_in i_not j_in j_not.
        apply other_evictable, (Permutation_in _ split) in j_in.
        replace (taken ++ following :: rest) with ((taken ++ [following]) ++ rest) in j_in
          by (now rewrite <- app_assoc).
        apply in_app_or in j_in. destruct j_in as [j_in | j_in]; [contradiction |].
        apply (rises_app A (taken ++ [following]) rest); [|assumption..].
        rewrite <- app_assoc. simpl. rewrite <- order_is. apply ascending_rises. }
    assert (mass rows a other <= ε * A_V) as within.
    { apply (Rmult_le_compat_r A_V) in other_within_share; [|lra].
      replace (mass rows a other / A_V * A_V) with (mass rows a other) in other_within_share by (field; lra).
      assumption. }
    unfold mass in within. fold A in within. rewrite sum_app in lightest. simpl in lightest.
    change (sum (fun j => A j) taken) with (sum A taken) in next.
    change (sum (fun j => A j) other) with (sum A other) in within. lra.
Qed.

(* The same in the other direction: one token more than the rule takes loses more than the share ε. *)
Theorem mass_more_loses_more :
  forall (rows : list nat) (a : nat -> nat -> R) (spared : nat -> bool) (ε : R) (V other : list nat)
    (attention_nonnegative : forall i j, 0 <= a i j)
    (share_nonnegative : 0 <= ε) (mass_positive : 0 < mass rows a V) (candidates_once : NoDup V)
    (other_once : NoDup other) (other_are_candidates : incl other V)
    (other_spares_the_same : forall j, In j other -> spared j = false)
    (other_has_more : (length (by_mass rows a spared ε V) < length other)%nat),
  ε < mass rows a other / mass rows a V.
Proof.
  intros. destruct (Rle_lt_dec (mass rows a other / mass rows a V) ε) as [within|]; [exfalso | assumption].
  apply (mass_optimal rows a spared) in within; [lia | assumption..].
Qed.

(* From ε = 1 on every token that is not spared goes. *)
Theorem mass_takes_all :
  forall (rows : list nat) (a : nat -> nat -> R) (spared : nat -> bool) (ε : R) (V : list nat)
    (attention_nonnegative : forall i j, 0 <= a i j)
    (share_is_all : 1 <= ε) (mass_positive : 0 < mass rows a V) (candidates_once : NoDup V),
  length (by_mass rows a spared ε V) = length (filter (fun j => negb (spared j)) V).
Proof.
  intros. set (evictable := filter (fun j => negb (spared j)) V).
  destruct (while_within_spec (received rows a) 0 (ε * mass rows a V) (ascending (received rows a) evictable))
    as [_ [rest [order_is _]]]; [apply Rmult_le_pos; lra |].
  pose proof (Permutation_length (ascending_permutation (received rows a) evictable)) as same.
  rewrite order_is, app_length in same. apply Nat.le_antisymm; [unfold by_mass; fold evictable; lia |].
  apply (mass_optimal rows a spared); try assumption; [lra | now apply NoDup_filter | |  |].
  - intros j j_in. now apply filter_In in j_in.
  - intros j j_in. apply filter_In in j_in. now apply Bool.negb_true_iff.
  - assert (forall j, 0 <= received rows a j) by (intros j; apply sum_nonnegative; auto).
    assert (mass rows a evictable <= mass rows a V).
    { unfold mass. rewrite (sum_split (fun j => received rows a j) (fun j => negb (spared j)) V).
      pose proof (sum_nonnegative (fun j => received rows a j) (filter (fun j => negb (negb (spared j))) V)) as spare.
      unfold evictable. assert (0 <= (Σ j ∈ filter (fun j => negb (negb (spared j))) V, received rows a j))
        by auto. lra. }
    apply Rle_trans with 1; [|assumption].
    apply (Rmult_le_reg_r (mass rows a V)); [assumption |].
    replace (mass rows a evictable / mass rows a V * mass rows a V) with (mass rows a evictable) by (field; lra). lra.
Qed.
