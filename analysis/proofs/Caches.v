(* The two caches that the paper (arXiv 2602.02197) compares, as functions of the step: greedy eviction (Corollary 2.1)
   and marking with a recycle bin (Figure 1). Both are given the same lane; this file defines them and proves what they
   hold. No real number occurs, and no axiom.

   Tokens are numbered by arrival: 0 .. prompt - 1 are the prompt, and prompt + s - 1 arrives at step s = 1, 2, ...
   A list of residents is ascending, so its last entries are the newest. *)

From Coq Require Import List Arith Lia Bool Permutation.
From HAE Require Import Sums.
Import ListNotations.

(* 1. The model *)

(* Scores may be of any type that can be compared: real numbers, or doubles. They depend on the step and the token, not
   on what was evicted: score s j is token j's after the row of step s. What the prefill leaves (pruning, fitting to the
   budget) is any part of the prompt, the same for both caches. Sinks and the newest `recent` residents are protected. *)
Record lane : Type := {
  Score : Type;
  at_most : Score -> Score -> bool;
  score : nat -> nat -> Score;
  prompt : nat;
  after_prefill : nat -> bool;
  sinks : nat;
  recent : nat;
}.

(* Marked tokens are pending: still resident, and still attended to. *)
Record cache : Type := { residents : list nat; pending : list nat }.

Definition unmarked (c : cache) : list nat := filter (fun j => negb (member j (pending c))) (residents c).

(* Residents that a score may evict: no sink, not among the newest `recent` residents (pending ones counted), not
   pending. *)
Definition eligible (x : lane) (c : cache) : list nat :=
  filter (fun j => (sinks x <=? j) && negb (member j (pending c)))
    (firstn (length (residents c) - recent x) (residents c)).

(* The one total order: the lower score first, and of equal ones the older token. *)
Definition goes_before (x : lane) (s i j : nat) : bool :=
  at_most x (score x s i) (score x s j) && (negb (at_most x (score x s j) (score x s i)) || (i <=? j)).

Fixpoint lowest (x : lane) (s : nat) (tokens : list nat) : option nat :=
  match tokens with
  | [] => None
  | j :: rest =>
      match lowest x s rest with
      | None => Some j
      | Some k => if goes_before x s j k then Some j else Some k
      end
  end.

(* What a rule with budget l takes at step s: the lowest eligible token, if more than l are unmarked. *)
Definition taken (x : lane) (l s : nat) (c : cache) : option nat :=
  if l <? length (unmarked c) then lowest x s (eligible x c) else None.

Definition arrive (c : cache) (newcomer : nat) : cache :=
  {| residents := residents c ++ [newcomer]; pending := pending c |}.

Definition start (x : lane) : list nat := filter (after_prefill x) (seq 0 (prompt x)).

Definition without (token : option nat) (tokens : list nat) : list nat :=
  match token with None => tokens | Some m => filter (fun j => negb (j =? m)) tokens end.

(* Greedy eviction: after step s its residents are `greedy x l s`, and what it evicts at that step is
   `greedy_eviction x l s`. With at most l residents before, one token a step is all that exceeds the budget. *)
Fixpoint greedy (x : lane) (l s : nat) : list nat :=
  match s with
  | 0 => start x
  | S r => let c := arrive {| residents := greedy x l r; pending := [] |} (prompt x + r) in
           without (taken x l s c) (residents c)
  end.

Definition greedy_eviction (x : lane) (l s : nat) : option nat :=
  match s with
  | 0 => None
  | S r => taken x l s (arrive {| residents := greedy x l r; pending := [] |} (prompt x + r))
  end.

(* The recycle bin: mark one token a step, and when D are pending evict them all. *)
Definition mark (token : option nat) (c : cache) : cache :=
  match token with None => c | Some m => {| residents := residents c; pending := m :: pending c |} end.

Definition flush (D : nat) (c : cache) : cache :=
  if length (pending c) =? D then {| residents := unmarked c; pending := [] |} else c.

Fixpoint bin (x : lane) (l D s : nat) : cache :=
  match s with
  | 0 => {| residents := start x; pending := [] |}
  | S r => let c := arrive (bin x l D r) (prompt x + r) in flush D (mark (taken x l s c) c)
  end.

Definition bin_mark (x : lane) (l D s : nat) : option nat :=
  match s with
  | 0 => None
  | S r => taken x l s (arrive (bin x l D r) (prompt x + r))
  end.

(* What the bin evicts at step s: what was resident when the step began, or came in it, and is so no longer. *)
Definition bin_evictions (x : lane) (l D s : nat) : list nat :=
  match s with
  | 0 => []
  | S r => filter (fun j => negb (member j (residents (bin x l D s)))) (residents (bin x l D r) ++ [prompt x + r])
  end.

(* All tokens that came until step s, those of them that left the prefill, and those that a cache holds no longer. *)
Definition arrived (x : lane) (s : nat) : list nat := seq 0 (prompt x + s).
Definition seen (x : lane) (s : nat) : list nat := start x ++ seq (prompt x) s.
Definition evicted (x : lane) (s : nat) (kept : list nat) : list nat :=
  filter (fun j => negb (member j kept)) (arrived x s).

(* What theorems ask of a lane. *)
Definition ordered_scores (x : lane) : Prop :=
  (forall u v, at_most x u v = true \/ at_most x v u = true) /\
  (forall u v w, at_most x u v = true -> at_most x v w = true -> at_most x u w = true).
Definition fixed_scores (x : lane) : Prop := forall s j, score x s j = score x 0 j.
Definition growing_scores (x : lane) : Prop := forall s j, at_most x (score x s j) (score x (S s) j) = true.
Definition nothing_protected (x : lane) : Prop := sinks x = 0 /\ recent x = 0.

(* 2. Lists *)

Lemma filter_filter : forall {T : Type} (p q : T -> bool) (l : list T),
  filter p (filter q l) = filter (fun j => q j && p j) l.
Proof.
  intros T p q l. induction l as [|j l IH]; simpl; [reflexivity |].
  destruct (q j); simpl; now rewrite IH.
Qed.

Lemma filter_all : forall {T : Type} (p : T -> bool) (l : list T),
  (forall j, In j l -> p j = true) -> filter p l = l.
Proof.
  intros T p l. induction l as [|j l IH]; intros all; simpl; [reflexivity |].
  rewrite all, IH; auto with datatypes.
Qed.

Lemma length_filter : forall {T : Type} (p : T -> bool) (l : list T), length (filter p l) <= length l.
Proof. intros T p l. pose proof (length_split p l). lia. Qed.

Lemma in_firstn : forall (j k : nat) (l : list nat), In j (firstn k l) -> In j l.
Proof. intros j k l j_in. rewrite <- (firstn_skipn k l). apply in_or_app. now left. Qed.

Lemma firstn_grows : forall (j k n : nat) (l : list nat), k <= n -> In j (firstn k l) -> In j (firstn n l).
Proof.
  intros j k n l fewer j_in. rewrite <- (Nat.min_l k n fewer), <- firstn_firstn in j_in. now apply in_firstn in j_in.
Qed.

Lemma no_duplicates_across : forall (l m : list nat) (j : nat), NoDup (l ++ m) -> In j l -> ~ In j m.
Proof.
  intros l m j once j_in_l j_in_m. induction l as [|k l IH]; [contradiction |].
  simpl in once. apply NoDup_cons_iff in once. destruct j_in_l as [-> | j_in_l]; [|tauto].
  apply (proj1 once), in_or_app. now right.
Qed.

Lemma no_duplicates_joined : forall (l m : list nat),
  NoDup l -> NoDup m -> (forall j, In j l -> ~ In j m) -> NoDup (l ++ m).
Proof.
  intros l m l_once m_once apart. induction l as [|k l IH]; [assumption |].
  apply NoDup_cons_iff in l_once. simpl. constructor.
  - intros k_in. apply in_app_or in k_in. destruct k_in as [k_in | k_in]; [tauto |].
    apply (apart k); [now left | assumption].
  - apply IH; [tauto |]. intros j j_in. apply apart. now right.
Qed.

Lemma no_duplicates_with_newcomer : forall (l : list nat) (n : nat), NoDup l -> ~ In n l -> NoDup (l ++ [n]).
Proof.
  intros l n once new. apply (Permutation_NoDup (Permutation_cons_append l n)). now constructor.
Qed.

(* 3. The lowest token *)

Lemma lowest_in : forall x s tokens m, lowest x s tokens = Some m -> In m tokens.
Proof.
  intros x s tokens. induction tokens as [|j rest IH]; simpl; [discriminate |]. intros m found.
  destruct (lowest x s rest) as [k|]; [|left; congruence].
  destruct (goes_before x s j k); injection found as <-; auto.
Qed.

Lemma lowest_some : forall x s tokens, tokens <> [] -> lowest x s tokens <> None.
Proof.
  intros x s [|j rest] not_empty; [contradiction |]. simpl.
  destruct (lowest x s rest) as [k|]; [destruct (goes_before x s j k)|]; discriminate.
Qed.

Section Order.
Variable x : lane.
Hypothesis scores_ordered : ordered_scores x.

Lemma at_most_refl : forall u, at_most x u u = true.
Proof. intros u. destruct (proj1 scores_ordered u u); assumption. Qed.

Lemma goes_before_is_at_most : forall s i j,
  goes_before x s i j = true -> at_most x (score x s i) (score x s j) = true.
Proof. intros s i j before. now apply andb_prop in before. Qed.

Lemma goes_before_refl : forall s j, goes_before x s j j = true.
Proof.
  intros s j. unfold goes_before. rewrite at_most_refl, Nat.leb_refl. simpl. reflexivity.
Qed.

Lemma goes_before_total : forall s i j, goes_before x s i j = false -> goes_before x s j i = true.
Proof.
  intros s i j. unfold goes_before. destruct (proj1 scores_ordered (score x s i) (score x s j)) as [ij | ji].
  - rewrite ij. simpl. destruct (at_most x (score x s j) (score x s i)); simpl; [|discriminate].
    rewrite Nat.leb_gt, Nat.leb_le. lia.
  - rewrite ji. simpl. destruct (at_most x (score x s i) (score x s j)); simpl; [|reflexivity].
    rewrite Nat.leb_gt, Nat.leb_le. lia.
Qed.

Lemma goes_before_trans : forall s i j k,
  goes_before x s i j = true -> goes_before x s j k = true -> goes_before x s i k = true.
Proof.
  intros s i j k. unfold goes_before. rewrite !andb_true_iff, !orb_true_iff, !negb_true_iff, !Nat.leb_le.
  destruct scores_ordered as [_ trans]. intros [ij first] [jk second]. split; [now apply trans with (score x s j) |].
  destruct (at_most x (score x s k) (score x s i)) eqn:ki; [right | now left].
  (* All three scores are equal. *)
  assert (at_most x (score x s j) (score x s i) = true) by now apply trans with (score x s k).
  assert (at_most x (score x s k) (score x s j) = true) by now apply trans with (score x s i).
  destruct first, second; try congruence. lia.
Qed.

Lemma lowest_goes_before : forall s tokens m,
  lowest x s tokens = Some m -> forall j, In j tokens -> goes_before x s m j = true.
Proof.
  intros s tokens. induction tokens as [|i rest IH]; simpl; [discriminate |]. intros m found j j_in.
  destruct (lowest x s rest) as [k|] eqn:lowest_rest.
  - destruct (goes_before x s i k) eqn:before; injection found as <-.
    + destruct j_in as [<- | j_in]; [apply goes_before_refl |].
      apply goes_before_trans with k; [assumption | now apply IH].
    + destruct j_in as [<- | j_in]; [now apply goes_before_total | now apply IH].
  - injection found as <-. destruct j_in as [<- | j_in]; [apply goes_before_refl |].
    destruct rest as [|n rest]; [contradiction |]. now apply lowest_some in lowest_rest.
Qed.

End Order.

(* 4. What the bin holds *)

(* Pending tokens are never among the newest `recent` residents: when one was marked as many newer ones were there, and
   nothing leaves before it does. *)
Definition well_formed (x : lane) (s : nat) (c : cache) : Prop :=
  NoDup (residents c) /\ (forall j, In j (residents c) -> j < prompt x + s) /\ NoDup (pending c) /\
  (forall j, In j (pending c) -> In j (firstn (length (residents c) - recent x) (residents c))).

Lemma taken_is_eligible : forall x l s c m, taken x l s c = Some m -> In m (eligible x c).
Proof.
  intros x l s c m. unfold taken. destruct (l <? length (unmarked c)); [apply lowest_in | discriminate].
Qed.

Lemma arrive_well_formed : forall x s c,
  well_formed x s c -> well_formed x (S s) (arrive c (prompt x + s)).
Proof.
  intros x s c [once [came [pending_once old]]]. unfold well_formed, arrive. simpl. repeat split.
  - apply no_duplicates_with_newcomer; [assumption |]. intros new_in. apply came in new_in. lia.
  - intros j j_in. apply in_app_or in j_in. destruct j_in as [j_in | [<- | []]]; [apply came in j_in|]; lia.
  - assumption.
  - intros j j_in. apply old in j_in. rewrite firstn_app, app_length. simpl. apply in_or_app. left.
    apply firstn_grows with (2 := j_in). lia.
Qed.

Lemma mark_well_formed : forall x l s c, well_formed x s c -> well_formed x s (mark (taken x l s c) c).
Proof.
  intros x l s c formed. destruct (taken x l s c) as [m|] eqn:found; [|assumption].
  apply taken_is_eligible, filter_In in found. destruct found as [m_old m_eligible].
  apply andb_prop in m_eligible. destruct m_eligible as [_ m_new].
  apply negb_true_iff, member_false_iff in m_new.
  destruct formed as [once [came [pending_once old]]]. repeat split; try assumption; simpl.
  - now constructor.
  - intros j [<- | j_in]; auto.
Qed.

Lemma flush_well_formed : forall x D s c, well_formed x s c -> well_formed x s (flush D c).
Proof.
  intros x D s c formed. unfold flush. destruct (length (pending c) =? D); [|assumption].
  destruct formed as [once [came _]]. repeat split; simpl.
  - now apply NoDup_filter.
  - intros j j_in. apply filter_In in j_in. now apply came.
  - constructor.
  - contradiction.
Qed.

Lemma bin_well_formed : forall x l D s, well_formed x s (bin x l D s).
Proof.
  intros x l D s. induction s as [|r IH]; simpl.
  - repeat split; simpl; [apply NoDup_filter, seq_NoDup | | constructor | contradiction].
    intros j j_in. apply filter_In in j_in. destruct j_in as [j_in _]. apply in_seq in j_in. lia.
  - apply flush_well_formed, mark_well_formed, arrive_well_formed, IH.
Qed.

Lemma pending_is_resident : forall x s c, well_formed x s c -> incl (pending c) (residents c).
Proof. intros x s c [_ [_ [_ old]]] j j_in. apply old in j_in. now apply in_firstn in j_in. Qed.

Lemma residents_are_unmarked_and_pending : forall x s c, well_formed x s c ->
  Permutation (residents c) (unmarked c ++ pending c).
Proof.
  intros x s c formed. pose proof (pending_is_resident x s c formed) as resident.
  destruct formed as [once [_ [pending_once _]]]. apply NoDup_Permutation; [assumption | |].
  - apply no_duplicates_joined; [now apply NoDup_filter | assumption |]. intros j j_in. apply filter_In in j_in.
    destruct j_in as [_ not_pending]. now apply negb_true_iff, member_false_iff in not_pending.
  - intros j. rewrite in_app_iff. unfold unmarked. rewrite filter_In, negb_true_iff, member_false_iff. split.
    + intros j_in. destruct (in_dec Nat.eq_dec j (pending c)); tauto.
    + intros [[j_in _] | j_in]; [assumption | now apply resident].
Qed.

Lemma pending_below_capacity : forall x l D s, 1 <= D -> length (pending (bin x l D s)) < D.
Proof.
  intros x l D s bin_positive. induction s as [|r IH]; simpl; [lia |].
  set (c := arrive (bin x l D r) (prompt x + r)). set (t := taken x l (S r) c).
  assert (length (pending (mark t c)) <= D) by (destruct t; unfold c; simpl; lia).
  unfold flush. destruct (length (pending (mark t c)) =? D) eqn:full; simpl; [lia |].
  apply Nat.eqb_neq in full. lia.
Qed.

(* 5. The bin's unmarked tokens against greedy eviction's residents *)

Lemma unmarked_without_pending : forall tokens, unmarked {| residents := tokens; pending := [] |} = tokens.
Proof. intros tokens. now apply filter_all. Qed.

Lemma unmarked_flush : forall D c, unmarked (flush D c) = unmarked c.
Proof.
  intros D c. unfold flush. destruct (length (pending c) =? D); [apply unmarked_without_pending | reflexivity].
Qed.

Lemma unmarked_mark : forall token c, unmarked (mark token c) = without token (unmarked c).
Proof.
  intros [m|] c; [|reflexivity]. unfold unmarked. simpl. rewrite filter_filter. apply filter_ext. intros j.
  change (member j (m :: pending c)) with ((j =? m) || member j (pending c)).
  rewrite negb_orb. apply andb_comm.
Qed.

Lemma unmarked_arrive : forall x s c, well_formed x s c ->
  unmarked (arrive c (prompt x + s)) = unmarked c ++ [prompt x + s].
Proof.
  intros x s c formed. unfold unmarked, arrive. simpl. rewrite filter_app. f_equal. simpl.
  destruct (member (prompt x + s) (pending c)) eqn:is_pending; [|reflexivity].
  apply member_iff_in, (pending_is_resident x s c formed) in is_pending.
  apply (proj1 (proj2 formed)) in is_pending. lia.
Qed.

(* The same tokens are eligible, whether pending ones are still there or not. *)
Lemma eligible_without_pending : forall x s c, well_formed x s c ->
  eligible x {| residents := unmarked c; pending := [] |} = eligible x c.
Proof.
  intros x s c [once [_ [_ old]]]. unfold eligible. simpl.
  set (k := length (residents c) - recent x) in *. set (np := fun j => negb (member j (pending c))).
  assert (unmarked c = filter np (firstn k (residents c)) ++ skipn k (residents c)) as parts.
  { unfold unmarked. fold np. rewrite <- (firstn_skipn k (residents c)) at 1. rewrite filter_app. f_equal.
    apply filter_all. intros j j_new. apply negb_true_iff, member_false_iff. intros j_pending.
    apply old in j_pending. rewrite <- (firstn_skipn k (residents c)) in once.
    now apply (no_duplicates_across _ _ _ once) in j_pending. }
  assert (firstn (length (unmarked c) - recent x) (unmarked c) = filter np (firstn k (residents c))) as older.
  { pose proof (skipn_length k (residents c)) as newest.
    destruct (le_lt_dec (recent x) (length (residents c))) as [many | few].
    - rewrite parts, app_length.
      replace (length (filter np (firstn k (residents c))) + length (skipn k (residents c)) - recent x)
        with (length (filter np (firstn k (residents c))) + 0) by lia.
      rewrite firstn_app_2. simpl. apply app_nil_r.
    - replace k with 0 by lia. simpl.
      pose proof (length_filter np (residents c)). unfold unmarked. fold np.
      replace (length (filter np (residents c)) - recent x) with 0 by lia. reflexivity. }
  rewrite older, filter_filter. apply filter_ext. intros j. unfold np. rewrite andb_true_r. apply andb_comm.
Qed.

Lemma taken_without_pending : forall x l s r c, well_formed x r c ->
  taken x l s {| residents := unmarked c; pending := [] |} = taken x l s c.
Proof.
  intros x l s r c formed. unfold taken. now rewrite unmarked_without_pending, (eligible_without_pending x r c formed).
Qed.

Lemma greedy_is_unmarked : forall x l D s, greedy x l s = unmarked (bin x l D s).
Proof.
  intros x l D s. induction s as [|r IH]; simpl; [now rewrite unmarked_without_pending |].
  pose proof (bin_well_formed x l D r) as formed.
  rewrite unmarked_flush, unmarked_mark, (unmarked_arrive x r) by assumption. rewrite <- IH.
  rewrite <- (taken_without_pending x l (S r) (S r) (arrive (bin x l D r) (prompt x + r)))
    by now apply arrive_well_formed.
  now rewrite (unmarked_arrive x r), <- IH by assumption.
Qed.

(* 6. What greedy eviction holds *)

Lemma greedy_well_formed : forall x l s,
  NoDup (greedy x l s) /\ (forall j, In j (greedy x l s) -> j < prompt x + s).
Proof.
  intros x l s. rewrite (greedy_is_unmarked x l 1 s). destruct (bin_well_formed x l 1 s) as [once [came _]].
  split; [now apply NoDup_filter |]. intros j j_in. apply filter_In in j_in. now apply came.
Qed.

Lemma without_in : forall token tokens j, In j (without token tokens) -> In j tokens.
Proof. intros [m|] tokens j; simpl; [|tauto]. rewrite filter_In. tauto. Qed.

Lemma greedy_never_takes_back : forall x l s later j,
  j < prompt x + s -> ~ In j (greedy x l s) -> s <= later -> ~ In j (greedy x l later).
Proof.
  intros x l s later j came gone after. induction after as [|r after IH]; [assumption |].
  simpl. intros j_in. apply without_in, in_app_or in j_in. destruct j_in as [j_in | [j_new | []]]; [tauto | lia].
Qed.

Lemma greedy_eviction_leaves : forall x l s j, greedy_eviction x l s = Some j ->
  In j (greedy x l (pred s) ++ [prompt x + pred s]) /\ ~ In j (greedy x l s) /\ j < prompt x + s /\ 1 <= s.
Proof.
  intros x l [|r] j found; simpl in *; [discriminate |]. pose proof found as resident.
  apply taken_is_eligible, filter_In in resident. destruct resident as [resident _].
  apply in_firstn in resident. simpl in resident. rewrite found. repeat split; [assumption | | | lia].
  - simpl. rewrite filter_In, Nat.eqb_refl. simpl. intros [_ contradictory]. discriminate.
  - apply in_app_or in resident. destruct resident as [j_in | [<- | []]]; [|lia].
    apply (proj2 (greedy_well_formed x l r)) in j_in. lia.
Qed.

(* A token is evicted once. *)
Lemma greedy_evicts_once : forall x l s r j,
  greedy_eviction x l s = Some j -> greedy_eviction x l r = Some j -> s = r.
Proof.
  assert (forall x l s r j, greedy_eviction x l s = Some j -> greedy_eviction x l r = Some j -> ~ s < r) as not_before.
  { intros x l s r j first second earlier.
    apply greedy_eviction_leaves in first, second.
    destruct first as [_ [gone [came _]]], second as [resident _].
    apply in_app_or in resident. destruct resident as [j_in | [<- | []]]; [|lia].
    apply (greedy_never_takes_back x l s (pred r) j came gone) in j_in; [assumption | lia]. }
  intros x l s r j first second.
  pose proof (not_before x l s r j first second). pose proof (not_before x l r s j second first). lia.
Qed.

(* 7. Fixed scores without protection: greedy eviction holds the best of all it saw *)

Lemma seen_later : forall x s, seen x (S s) = seen x s ++ [prompt x + s].
Proof. intros x s. unfold seen. rewrite seq_S. apply app_assoc. Qed.

Lemma seen_once : forall x s, NoDup (seen x s).
Proof.
  intros x s. apply no_duplicates_joined; [apply NoDup_filter, seq_NoDup | apply seq_NoDup |].
  intros j j_in j_new. apply filter_In in j_in. destruct j_in as [j_in _]. apply in_seq in j_in, j_new. lia.
Qed.

Lemma kept_was_seen : forall x l s, incl (greedy x l s) (seen x s).
Proof.
  intros x l s. induction s as [|r IH]; simpl; [unfold seen; simpl; rewrite app_nil_r; apply incl_refl |].
  intros j j_in. apply without_in in j_in. simpl in j_in. rewrite seen_later. apply in_or_app.
  apply in_app_or in j_in. destruct j_in as [j_in | j_in]; [left; now apply IH | now right].
Qed.

Lemma bin_was_seen : forall x l D s, incl (residents (bin x l D s)) (seen x s).
Proof.
  intros x l D s. induction s as [|r IH]; simpl; [unfold seen; simpl; rewrite app_nil_r; apply incl_refl |].
  set (c := arrive (bin x l D r) (prompt x + r)). set (t := taken x l (S r) c).
  assert (incl (residents (flush D (mark t c))) (residents c)) as fewer.
  { unfold flush. destruct (length (pending (mark t c)) =? D); simpl; [|destruct t; apply incl_refl].
    intros j j_in. apply filter_In in j_in. destruct j_in as [j_in _]. now destruct t. }
  intros j j_in. apply fewer, in_app_or in j_in. rewrite seen_later. apply in_or_app.
  destruct j_in as [j_in | j_in]; [left; now apply IH | now right].
Qed.

Lemma length_without : forall m tokens, NoDup tokens -> In m tokens ->
  length tokens = S (length (without (Some m) tokens)).
Proof.
  intros m tokens once m_in. simpl. rewrite (length_split (fun j => j =? m)).
  assert (Permutation (filter (fun j => j =? m) tokens) [m]) as alone.
  { apply NoDup_Permutation; [now apply NoDup_filter | repeat constructor; auto |].
    intros j. rewrite filter_In, Nat.eqb_eq. simpl. split; [intros [_ ->]; auto | intros [<- | []]; auto]. }
  rewrite (Permutation_length alone). reflexivity.
Qed.

(* Either everything seen is there, or the budget is used and what is gone goes before what is there. *)
Definition best_of_seen (x : lane) (b s : nat) : Prop :=
  (incl (seen x s) (greedy x b s) /\ length (greedy x b s) <= b) \/
  (length (greedy x b s) = b /\
   forall i j, In i (seen x s) -> ~ In i (greedy x b s) -> In j (greedy x b s) -> goes_before x 0 i j = true).

Lemma greedy_is_best_of_seen : forall x b s,
  ordered_scores x -> fixed_scores x -> nothing_protected x -> length (start x) <= b -> best_of_seen x b s.
Proof.
  intros x b s ordered fixed [no_sinks no_recent] fits. induction s as [|r IH].
  - left. unfold seen. simpl. rewrite app_nil_r. split; [apply incl_refl | assumption].
  - set (c := {| residents := greedy x b r ++ [prompt x + r]; pending := [] |}).
    assert (greedy x b (S r) = without (taken x b (S r) c) (residents c)) as next by reflexivity.
    assert (eligible x c = residents c) as all_eligible.
    { unfold eligible. rewrite no_sinks, no_recent, Nat.sub_0_r, firstn_all. now apply filter_all. }
    assert (NoDup (residents c)) as once.
    { destruct (greedy_well_formed x b r) as [once came]. apply no_duplicates_with_newcomer; [assumption |].
      intros new_in. apply came in new_in. lia. }
    assert (length (residents c) = S (length (greedy x b r))) as longer
      by (simpl; rewrite app_length; simpl; lia).
    unfold taken in next. unfold c at 1 in next. rewrite unmarked_without_pending in next. fold c in next.
    change (greedy x b r ++ [prompt x + r]) with (residents c) in next. rewrite all_eligible in next.
    destruct (b <? length (residents c)) eqn:full.
    + (* One token goes: the lowest of those that are there. *)
      apply Nat.ltb_lt in full. right.
      assert (length (greedy x b r) = b) as was_full by (destruct IH as [[_ few] | [used _]]; lia).
      destruct (lowest x (S r) (residents c)) as [m|] eqn:found.
      2: { apply lowest_some in found; [contradiction |]. intros empty. rewrite empty in longer. simpl in longer. lia. }
      pose proof (lowest_in x (S r) _ m found) as m_in.
      pose proof (lowest_goes_before x ordered (S r) _ m found) as m_first.
      assert (forall i j, goes_before x (S r) i j = goes_before x 0 i j) as same
        by (intros; unfold goes_before; now rewrite !(fixed (S r))).
      split; [rewrite next; pose proof (length_without m _ once m_in); lia |].
      intros i j i_seen i_gone j_kept. rewrite next in i_gone, j_kept. pose proof j_kept as j_there.
      apply without_in in j_there. simpl in i_gone. rewrite filter_In, negb_true_iff, Nat.eqb_neq in i_gone.
      destruct (Nat.eq_dec i m) as [-> | other]; [rewrite <- same; now apply m_first |].
      assert (~ In i (residents c)) as i_absent by tauto.
      assert (In i (seen x r)) as i_seen_before.
      { rewrite seen_later in i_seen. apply in_app_or in i_seen. destruct i_seen as [|i_new]; [assumption |].
        exfalso. apply i_absent. simpl. apply in_or_app. now right. }
      assert (~ In i (greedy x b r)) as i_gone_before
        by (intros i_in; apply i_absent; simpl; apply in_or_app; now left).
      destruct IH as [[all _] | [_ before]]; [now apply all in i_seen_before |].
      simpl in j_there. apply in_app_or in j_there. destruct j_there as [j_there | [<- | []]]; [now apply before |].
      (* The newcomer stays, so an older token goes, and i goes before that one. *)
      apply (goes_before_trans x ordered) with m.
      * apply before; try assumption. simpl in m_in. apply in_app_or in m_in.
        destruct m_in as [|[<- | []]]; [assumption |]. exfalso.
        simpl in j_kept. rewrite filter_In, Nat.eqb_refl in j_kept. simpl in j_kept. destruct j_kept. discriminate.
      * rewrite <- same. apply m_first. simpl. apply in_or_app. right. now left.
    + (* There is room. *)
      apply Nat.ltb_ge in full. left. rewrite next. simpl without. split; [|assumption].
      destruct IH as [[all _] | [used _]]; [|lia].
      intros j j_seen. rewrite seen_later in j_seen. simpl. apply in_or_app. apply in_app_or in j_seen.
      destruct j_seen as [j_seen | j_new]; [left; now apply all | now right].
Qed.

(* 8. Sizes *)

Lemma greedy_size : forall x b s, length (start x) <= b -> sinks x + recent x <= b -> length (greedy x b s) <= b.
Proof.
  intros x b s fits protected_fit. induction s as [|r IH]; [assumption |].
  destruct (greedy_well_formed x b r) as [once came].
  set (c := {| residents := greedy x b r ++ [prompt x + r]; pending := [] |}).
  assert (greedy x b (S r) = without (taken x b (S r) c) (residents c)) as next by reflexivity.
  assert (NoDup (residents c)) as c_once.
  { apply no_duplicates_with_newcomer; [assumption |]. intros new_in. apply came in new_in. lia. }
  assert (length (residents c) = S (length (greedy x b r))) as longer by (simpl; rewrite app_length; simpl; lia).
  rewrite next. destruct (taken x b (S r) c) as [m|] eqn:found.
  - apply taken_is_eligible, filter_In in found. destruct found as [m_in _]. apply in_firstn in m_in.
    pose proof (length_without m _ c_once m_in). lia.
  - unfold taken in found. unfold c at 1 in found. rewrite unmarked_without_pending in found. fold c in found.
    change (greedy x b r ++ [prompt x + r]) with (residents c) in found.
    destruct (b <? length (residents c)) eqn:full; [|apply Nat.ltb_ge in full; simpl without; assumption].
    (* More than b residents cannot all be protected. *)
    exfalso. apply Nat.ltb_lt in full.
    set (older := firstn (length (residents c) - recent x) (residents c)).
    assert (length older = length (residents c) - recent x) as many by (apply firstn_length_le; lia).
    assert (incl (filter (fun j => negb (sinks x <=? j)) older) (seq 0 (sinks x))) as few_sinks.
    { intros j j_in. apply filter_In in j_in. destruct j_in as [_ is_sink].
      apply negb_true_iff, Nat.leb_gt in is_sink. apply in_seq. lia. }
    assert (NoDup older) as older_once.
    { apply (no_duplicates_in_beginning _ (skipn (length (residents c) - recent x) (residents c))).
      unfold older. now rewrite firstn_skipn. }
    apply NoDup_incl_length in few_sinks; [|now apply NoDup_filter]. rewrite seq_length in few_sinks.
    pose proof (length_split (fun j => sinks x <=? j) older) as parts.
    apply lowest_some in found; [contradiction |]. unfold eligible. fold older. simpl pending.
    rewrite (filter_ext _ (fun j => sinks x <=? j)) by (intros j; simpl; apply andb_true_r).
    intros empty. rewrite empty in parts. simpl in parts. lia.
Qed.

(* 9. The model at work *)

(* All scores are equal, so the oldest eligible token goes. Token 0 is a sink, and the newest resident is protected: of
   0 1 2 3 token 1 goes at step 1, then token 2, then token 3. The bin holds token 1 until token 2 fills it. *)
Definition all_ties : lane := {|
  Score := nat; at_most := Nat.leb; score := fun _ _ => 0;
  prompt := 3; after_prefill := fun _ => true; sinks := 1; recent := 1 |}.

Example ties_evict_the_older :
  map (greedy_eviction all_ties 3) [1; 2; 3] = [Some 1; Some 2; Some 3] /\
  map (bin_evictions all_ties 3 2) [1; 2; 3] = [[]; [1; 2]; []] /\
  residents (bin all_ties 3 2 3) = [0; 3; 4; 5] /\ pending (bin all_ties 3 2 3) = [3].
Proof. repeat split. Qed.

(* The prefill left tokens 0 and 2 of three. Token 3's score is the number of the step: at step 1 it is the lowest, but
   also the newest and protected, so token 2 goes; at step 2 it goes itself. *)
Definition after_a_prefill : lane := {|
  Score := nat; at_most := Nat.leb; score := fun s j => if j =? 3 then s else 10 - j;
  prompt := 3; after_prefill := fun j => negb (j =? 1); sinks := 0; recent := 1 |}.

Example scores_of_the_step_decide :
  start after_a_prefill = [0; 2] /\
  map (greedy_eviction after_a_prefill 2) [1; 2; 3; 9] = [Some 2; Some 3; Some 4; Some 10].
Proof. repeat split. Qed.
