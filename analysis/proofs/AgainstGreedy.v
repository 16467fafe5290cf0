(* The recycle bin against greedy eviction: Corollary 2.1 of the paper (arXiv 2602.02197), and what is true in its place.

   The paper says that the bin's loss is at most greedy eviction's. We prove, for the two caches of Caches.v,

   - G1: at every step the bin marks what greedy eviction evicts, so that with the same budget it has lost a part of
     what greedy eviction lost, and misses no more in any row: less by the attention to the tokens in the bin;
   - C2.1: if the loss is a token's score when it is evicted, and scores are cumulative, the paper's comparison is
     reversed: the bin evicts a token at no lower a score than greedy eviction does;
   - G2: what greedy eviction with budget l keeps, the bin keeps. The bin does not keep a part of what greedy eviction
     with budget l + D keeps, but with fixed scores its mass lies between those of budgets l and l + D - 1;
   - G3: so with fixed scores greedy eviction misses no more than the bin where both need the same memory at their peak,
     and with scores that change this is false.

   The row of step s + 1 meets the cache that step s leaves, so `missed x s kept w` is what that row, with weights w,
   misses. Its denominator is the same for both caches, and is left out. *)

From Coq Require Import Reals List Arith Lra Lia Bool Permutation.
From HAE Require Import Sums Caches.
Import ListNotations.
Local Open Scope R_scope.

Definition missed (x : lane) (s : nat) (kept : list nat) (w : nat -> R) : R := Σ j ∈ evicted x s kept, w j.

(* 1. G1: the same lane, the same budget *)

Theorem G1_marks_are_greedys_evictions :
  forall (x : lane) (l D s : nat),
  bin_mark x l D s = greedy_eviction x l s /\ unmarked (bin x l D s) = greedy x l s.
Proof.
  intros. split; [|symmetry; apply greedy_is_unmarked].
  destruct s as [|r]; [reflexivity |]. simpl. pose proof (bin_well_formed x l D r) as formed.
  rewrite <- (taken_without_pending x l (S r) (S r) (arrive (bin x l D r) (prompt x + r)%nat))
    by now apply arrive_well_formed.
  now rewrite (unmarked_arrive x r), <- greedy_is_unmarked by assumption.
Qed.

Lemma bin_size : forall x l D s,
  length (residents (bin x l D s)) = (length (greedy x l s) + length (pending (bin x l D s)))%nat.
Proof.
  intros x l D s. rewrite (Permutation_length (residents_are_unmarked_and_pending x s _ (bin_well_formed x l D s))).
  now rewrite app_length, <- greedy_is_unmarked.
Qed.

(* The price is memory for fewer than D tokens more. *)
Theorem G1_evicted_subset :
  forall (x : lane) (l D s : nat) (bin_positive : (1 <= D)%nat),
  incl (evicted x s (residents (bin x l D s))) (evicted x s (greedy x l s)) /\
  (length (residents (bin x l D s)) < length (greedy x l s) + D)%nat.
Proof.
  intros. split.
  - intros j j_in. apply filter_In in j_in. destruct j_in as [came gone]. apply filter_In. split; [assumption |].
    rewrite negb_true_iff, member_false_iff in *. intros kept. apply gone.
    rewrite (greedy_is_unmarked x l D) in kept. now apply filter_In in kept.
  - pose proof (pending_below_capacity x l D s bin_positive). rewrite bin_size. lia.
Qed.

Lemma missed_and_kept : forall x s kept w,
  NoDup kept -> (forall j, In j kept -> (j < prompt x + s)%nat) ->
  missed x s kept w + (Σ j ∈ kept, w j) = (Σ j ∈ arrived x s, w j).
Proof.
  intros x s kept w once came. rewrite (sum_split (fun j => w j) (fun j => member j kept) (arrived x s)).
  assert (Permutation (filter (fun j => member j kept) (arrived x s)) kept) as all_kept.
  { apply NoDup_Permutation; [apply NoDup_filter, seq_NoDup | assumption |]. intros j.
    rewrite filter_In, member_iff_in. split; [tauto |]. intros j_in. split; [|assumption].
    apply in_seq. apply came in j_in. lia. }
  rewrite (sum_permutation _ _ _ all_kept). unfold missed, evicted. lra.
Qed.

Lemma missed_by_greedy : forall x l s w,
  missed x s (greedy x l s) w + (Σ j ∈ greedy x l s, w j) = (Σ j ∈ arrived x s, w j).
Proof. intros x l s w. destruct (greedy_well_formed x l s). now apply missed_and_kept. Qed.

Lemma missed_by_bin : forall x l D s w,
  missed x s (residents (bin x l D s)) w + (Σ j ∈ residents (bin x l D s), w j) = (Σ j ∈ arrived x s, w j).
Proof. intros x l D s w. destruct (bin_well_formed x l D s) as [once [came _]]. now apply missed_and_kept. Qed.

Lemma bin_mass : forall x l D s w,
  (Σ j ∈ residents (bin x l D s), w j) = (Σ j ∈ greedy x l s, w j) + (Σ j ∈ pending (bin x l D s), w j).
Proof.
  intros x l D s w.
  rewrite (sum_permutation _ _ _ (residents_are_unmarked_and_pending x s _ (bin_well_formed x l D s))).
  now rewrite sum_app, <- greedy_is_unmarked.
Qed.

(* The gain is the mass in the bin. *)
Theorem G1_missed_mass :
  forall (x : lane) (l D s : nat) (w : nat -> R) (weights_nonnegative : forall j, 0 <= w j),
  missed x s (residents (bin x l D s)) w <= missed x s (greedy x l s) w /\
  missed x s (greedy x l s) w - missed x s (residents (bin x l D s)) w = (Σ j ∈ pending (bin x l D s), w j).
Proof.
  intros. pose proof (missed_by_greedy x l s w). pose proof (missed_by_bin x l D s w).
  pose proof (bin_mass x l D s w).
  assert (0 <= (Σ j ∈ pending (bin x l D s), w j)) by (apply sum_nonnegative; auto). lra.
Qed.

(* 2. C2.1: scores at eviction *)

Lemma pending_was_marked : forall x l D s j,
  In j (pending (bin x l D s)) -> exists r, (r <= s)%nat /\ bin_mark x l D r = Some j.
Proof.
  intros x l D s j. induction s as [|r IH]; [contradiction |]. simpl bin.
  set (c := arrive (bin x l D r) (prompt x + r)%nat). unfold flush.
  destruct (length (pending (mark (taken x l (S r) c) c)) =? D)%nat; [contradiction |].
  destruct (taken x l (S r) c) as [m|] eqn:found; simpl; [intros [<- | j_in] | intros j_in].
  - exists (S r). split; [lia | exact found].
  - destruct (IH j_in) as [earlier [before marked]]. exists earlier. split; [lia | assumption].
  - destruct (IH j_in) as [earlier [before marked]]. exists earlier. split; [lia | assumption].
Qed.

Lemma evicted_was_marked : forall x l D s j,
  In j (bin_evictions x l D s) -> exists r, (r <= s)%nat /\ bin_mark x l D r = Some j.
Proof.
  intros x l D [|r] j; [contradiction |]. simpl. set (c := arrive (bin x l D r) (prompt x + r)%nat).
  change (residents (bin x l D r) ++ [(prompt x + r)%nat]) with (residents c).
  rewrite filter_In, negb_true_iff, member_false_iff. intros [j_in j_gone].
  assert (In j (pending (mark (taken x l (S r) c) c))) as j_pending.
  { unfold flush in j_gone. destruct (length (pending (mark (taken x l (S r) c) c)) =? D)%nat; simpl in j_gone.
    - unfold unmarked in j_gone. rewrite filter_In, negb_true_iff, member_false_iff in j_gone.
      destruct (in_dec Nat.eq_dec j (pending (mark (taken x l (S r) c) c))); [assumption |].
      exfalso. apply j_gone. split; [now destruct (taken x l (S r) c) | assumption].
    - exfalso. apply j_gone. now destruct (taken x l (S r) c). }
  destruct (taken x l (S r) c) as [m|] eqn:found; simpl in j_pending; [destruct j_pending as [<- | j_pending]|].
  - exists (S r). split; [lia | exact found].
  - destruct (pending_was_marked x l D r j j_pending) as [earlier [before marked]].
    exists earlier. split; [lia | assumption].
  - destruct (pending_was_marked x l D r j j_pending) as [earlier [before marked]].
    exists earlier. split; [lia | assumption].
Qed.

Lemma scores_grow_over : forall x s later j, ordered_scores x -> growing_scores x -> (s <= later)%nat ->
  at_most x (score x s j) (score x later j) = true.
Proof.
  intros x s later j ordered growing after. induction after as [|later after IH]; [now apply at_most_refl |].
  apply (proj2 ordered) with (score x later j); [assumption | apply growing].
Qed.

(* What the bin evicts at step s greedy eviction evicted too, at one step r and no other, no later, and at no higher a
   score. *)
Theorem C21_is_reversed :
  forall (x : lane) (l D s j : nat)
    (scores_ordered : ordered_scores x) (scores_grow : growing_scores x)
    (evicted_by_bin : In j (bin_evictions x l D s)),
  exists r, (forall t, greedy_eviction x l t = Some j <-> t = r) /\
    (r <= s)%nat /\ at_most x (score x r j) (score x s j) = true.
Proof.
  intros. destruct (evicted_was_marked x l D s j evicted_by_bin) as [r [before marked]].
  rewrite (proj1 (G1_marks_are_greedys_evictions x l D r)) in marked.
  exists r. repeat split; try assumption; [| now intros -> | now apply scores_grow_over].
  intros also. now apply (greedy_evicts_once x l t r j).
Qed.

(* It can be strict: the prompt's token is scored 10; token 1 is scored 1 when it is marked and 2 a step later, when
   token 2 fills the bin. *)
Definition one_token_grows : lane := {|
  Score := nat; at_most := Nat.leb;
  score := fun s j => match j with 0 => 10 | 1 => s | _ => 1 end%nat;
  prompt := 1; after_prefill := fun _ => true; sinks := 0; recent := 0 |}.

Theorem C21_can_be_strict :
  ordered_scores one_token_grows /\ growing_scores one_token_grows /\
  greedy_eviction one_token_grows 1 1 = Some 1%nat /\ score one_token_grows 1 1 = 1%nat /\
  bin_evictions one_token_grows 1 2 2 = [1%nat; 2%nat] /\ score one_token_grows 2 1 = 2%nat.
Proof.
  repeat split; try reflexivity.
  - simpl. intros u v. rewrite !Nat.leb_le. lia.
  - simpl. intros u v w. rewrite !Nat.leb_le. lia.
  - intros s [|[|j]]; simpl; try reflexivity. apply Nat.leb_le. lia.
Qed.

(* 3. G2: which tokens are kept, and their mass *)

Theorem G2_kept_subset :
  forall (x : lane) (l D s : nat),
  incl (greedy x l s) (residents (bin x l D s)).
Proof.
  intros x l D s j j_in. rewrite (greedy_is_unmarked x l D) in j_in. now apply filter_In in j_in.
Qed.

(* With l = 1 and D = 2, tokens scored 5 and 6 fill the bin and are flushed; then the token scored 1 waits in it. *)
Definition scored_10_5_6_1 : lane := {|
  Score := nat; at_most := Nat.leb;
  score := fun _ j => nth j [10; 5; 6; 1]%nat 0%nat;
  prompt := 1; after_prefill := fun _ => true; sinks := 0; recent := 0 |}.

Theorem G2_converse_refuted :
  ordered_scores scored_10_5_6_1 /\ fixed_scores scored_10_5_6_1 /\ nothing_protected scored_10_5_6_1 /\
  (length (start scored_10_5_6_1) <= 1)%nat /\
  residents (bin scored_10_5_6_1 1 2 3) = [0%nat; 3%nat] /\
  greedy scored_10_5_6_1 (1 + 2) 3 = [0%nat; 1%nat; 2%nat] /\
  ~ incl (residents (bin scored_10_5_6_1 1 2 3)) (greedy scored_10_5_6_1 (1 + 2) 3).
Proof.
  repeat split; try reflexivity.
  - simpl. intros u v. rewrite !Nat.leb_le. lia.
  - simpl. intros u v w. rewrite !Nat.leb_le. lia.
  - assert (residents (bin scored_10_5_6_1 1 2 3) = [0; 3]%nat) as bin_keeps by (vm_compute; reflexivity).
    assert (greedy scored_10_5_6_1 (1 + 2) 3 = [0; 1; 2]%nat) as greedy_keeps by (vm_compute; reflexivity).
    rewrite bin_keeps, greedy_keeps. intros within. specialize (within 3%nat). simpl in within.
    intuition discriminate.
Qed.

(* Weights need to grow with the score over tokens that the caches were given: what came later has none in the row. *)
Theorem G2_mass_between :
  forall (x : lane) (l D s : nat) (w : nat -> R)
    (scores_ordered : ordered_scores x) (scores_fixed : fixed_scores x) (no_protection : nothing_protected x)
    (prompt_fits : (length (start x) <= l)%nat) (bin_positive : (1 <= D)%nat)
    (weights_nonnegative : forall j, 0 <= w j)
    (weights_grow : forall i j, In i (seen x s) -> In j (seen x s) ->
      at_most x (score x 0 i) (score x 0 j) = true -> w i <= w j),
  (Σ j ∈ greedy x l s, w j) <= (Σ j ∈ residents (bin x l D s), w j) /\
  (Σ j ∈ residents (bin x l D s), w j) <= (Σ j ∈ greedy x (l + D - 1) s, w j).
Proof.
  intros. split.
  - rewrite bin_mass.
    assert (0 <= (Σ j ∈ pending (bin x l D s), w j)) by (apply sum_nonnegative; auto). lra.
  - destruct (bin_well_formed x l D s) as [bin_once _].
    destruct (greedy_well_formed x (l + D - 1) s) as [greedy_once _].
    pose proof (bin_was_seen x l D s) as bin_seen. pose proof (kept_was_seen x (l + D - 1) s) as greedy_seen.
    destruct (greedy_is_best_of_seen x (l + D - 1) s) as [[all _] | [used before]];
      try assumption; [lia | |]; apply lightest_subset; auto.
    + apply NoDup_incl_length; [assumption |]. now apply incl_tran with (seen x s).
    + intros i j i_in i_not. now apply bin_seen, all in i_in.
    + assert (length (greedy x l s) <= l)%nat.
      { apply greedy_size; [assumption |]. destruct no_protection as [-> ->]. lia. }
      pose proof (pending_below_capacity x l D s bin_positive). rewrite bin_size, used. lia.
    + intros i j i_in i_not j_in j_not. apply weights_grow; auto. now apply goes_before_is_at_most, before; auto.
Qed.

(* The three masses can differ: with a row that gives each token its score, the bin of that example holds 11, between the
   10 and the 16 of greedy eviction. *)
Theorem G2_mass_can_lie_strictly_between :
  let w := fun j => INR (score scored_10_5_6_1 0 j) in
  (forall j, 0 <= w j) /\
  (forall i j, at_most scored_10_5_6_1 (score scored_10_5_6_1 0 i) (score scored_10_5_6_1 0 j) = true -> w i <= w j) /\
  (Σ j ∈ greedy scored_10_5_6_1 1 3, w j) = 10 /\
  (Σ j ∈ residents (bin scored_10_5_6_1 1 2 3), w j) = 11 /\
  (Σ j ∈ greedy scored_10_5_6_1 (1 + 2 - 1) 3, w j) = 16.
Proof.
  assert (greedy scored_10_5_6_1 1 3 = [0]%nat) as few by (vm_compute; reflexivity).
  assert (residents (bin scored_10_5_6_1 1 2 3) = [0; 3]%nat) as in_between by (vm_compute; reflexivity).
  assert (greedy scored_10_5_6_1 (1 + 2 - 1) 3 = [0; 2]%nat) as many by (vm_compute; reflexivity).
  cbv zeta. rewrite few, in_between, many. repeat split; try (simpl; lra).
  - intros j. apply pos_INR.
  - intros i j below. apply le_INR, Nat.leb_le, below.
Qed.

(* 4. G3: at equal memory *)

(* At equal budget the bin never misses more; scores need not be fixed. a s is the row of step s. *)
Theorem G3_equal_budget :
  forall (x : lane) (l D : nat) (a : nat -> nat -> R) (attention_nonnegative : forall s j, 0 <= a s j) (s : nat),
  missed x s (residents (bin x l D s)) (a (S s)) <= missed x s (greedy x l s) (a (S s)).
Proof. intros. apply G1_missed_mass. auto. Qed.

(* Greedy eviction with budget l + D - 1 needs the bin's memory, and never misses more. *)
Theorem G3_equal_peak :
  forall (x : lane) (l D : nat) (a : nat -> nat -> R)
    (scores_ordered : ordered_scores x) (scores_fixed : fixed_scores x) (no_protection : nothing_protected x)
    (prompt_fits : (length (start x) <= l)%nat) (bin_positive : (1 <= D)%nat)
    (attention_nonnegative : forall s j, 0 <= a s j)
    (attention_grows : forall s i j, In i (seen x s) -> In j (seen x s) ->
      at_most x (score x 0 i) (score x 0 j) = true -> a (S s) i <= a (S s) j)
    (s : nat),
  missed x s (greedy x (l + D - 1) s) (a (S s)) <= missed x s (residents (bin x l D s)) (a (S s)).
Proof.
  intros. pose proof (missed_by_greedy x (l + D - 1) s (a (S s))).
  pose proof (missed_by_bin x l D s (a (S s))).
  destruct (G2_mass_between x l D s (a (S s))) as [_ less_mass]; try assumption; [auto | | lra].
  intros i j i_seen j_seen. now apply attention_grows.
Qed.

(* The two need the same memory: neither ever holds more than l + D - 1 tokens after a step, and both hold as many when
   so many were seen. *)
Theorem G3_peaks_are_equal :
  forall (x : lane) (l D s : nat)
    (scores_ordered : ordered_scores x) (scores_fixed : fixed_scores x) (no_protection : nothing_protected x)
    (prompt_fits : (length (start x) <= l)%nat) (bin_positive : (1 <= D)%nat),
  (length (greedy x (l + D - 1) s) <= l + D - 1)%nat /\
  (length (residents (bin x l D s)) <= l + D - 1)%nat /\
  (length (seen x s) = l + D - 1 ->
   length (greedy x (l + D - 1) s) = l + D - 1 /\ length (residents (bin x l D s)) = l + D - 1)%nat.
Proof.
  intros. assert (sinks x + recent x = 0)%nat as free by (destruct no_protection as [-> ->]; reflexivity).
  assert (length (greedy x l s) <= l)%nat by (apply greedy_size; [assumption | lia]).
  pose proof (pending_below_capacity x l D s bin_positive) as few_pending.
  pose proof (bin_size x l D s) as size.
  split; [apply greedy_size; lia | split; [lia |]]. intros filled. split.
  - destruct (greedy_is_best_of_seen x (l + D - 1) s) as [[all _] | [used _]]; try assumption; [lia |].
    pose proof (NoDup_incl_length (seen_once x s) all).
    pose proof (greedy_size x (l + D - 1) s). lia.
  - (* Until then nothing was flushed. *)
    rewrite <- filled. clear size few_pending.
    assert (length (seen x s) <= l + D - 1)%nat as few by lia. clear filled.
    induction s as [|r IH]; [unfold seen; simpl; now rewrite app_nil_r |].
    rewrite seen_later, app_length in few |- *. simpl length in few |- *.
    assert (length (greedy x l r) <= l)%nat as within by (apply greedy_size; [assumption | lia]).
    specialize (IH within ltac:(lia)).
    set (c := arrive (bin x l D r) (prompt x + r)%nat).
    assert (length (residents c) = S (length (residents (bin x l D r)))) as longer
      by (unfold c; simpl; rewrite app_length; simpl; lia).
    pose proof (arrive_well_formed x r _ (bin_well_formed x l D r)) as formed. fold c in formed.
    pose proof (Permutation_length (residents_are_unmarked_and_pending x (S r) c formed)) as parts.
    rewrite app_length in parts.
    assert (length (pending c) < D)%nat as few_pending by now apply pending_below_capacity.
    change (bin x l D (S r)) with (flush D (mark (taken x l (S r) c) c)). unfold flush. clearbody c.
    destruct (length (pending (mark (taken x l (S r) c) c)) =? D)%nat eqn:full.
    + exfalso. apply Nat.eqb_eq in full. unfold taken in full.
      destruct (l <? length (unmarked c))%nat eqn:over; simpl in full; [|lia].
      apply Nat.ltb_lt in over. destruct (lowest x (S r) (eligible x c)); simpl in full; lia.
    + destruct (taken x l (S r) c); simpl mark; simpl residents; lia.
Qed.

(* With scores that change, greedy eviction at equal peak memory can miss more. Five tokens, one of them the prompt; rows
   in sixteenths: rows 0 to 3 give themselves 16, 8, 4 and 2 and token 0 the rest, row 4 gives token 3 fifteen and itself
   one. A score is the sum over the rows so far. *)
Definition sixteenths (i j : nat) : nat :=
  match i with
  | 0 => nth j [16]
  | 1 => nth j [8; 8]
  | 2 => nth j [12; 0; 4]
  | 3 => nth j [14; 0; 0; 2]
  | 4 => nth j [0; 0; 0; 15; 1]
  | _ => fun _ => 0
  end%nat 0%nat.

Definition five_rows : lane := {|
  Score := nat; at_most := Nat.leb;
  score := fun s j => list_sum (map (fun i => sixteenths i j) (seq 0 (S s)));
  prompt := 1; after_prefill := fun _ => true; sinks := 0; recent := 0 |}.

Theorem G3_changing_scores_refuted :
  let a := fun i j => INR (sixteenths i j) / 16 in
  (forall i, In i (seq 0 5) -> (Σ j ∈ seq 0 (i + 1), a i j) = 1) /\
  ordered_scores five_rows /\ nothing_protected five_rows /\ (length (start five_rows) <= 1)%nat /\
  (Σ s ∈ seq 0 4, missed five_rows s (residents (bin five_rows 1 2 s)) (a (S s))) = 0 /\
  (Σ s ∈ seq 0 4, missed five_rows s (greedy five_rows (1 + 2 - 1) s) (a (S s))) = 0.9375.
Proof.
  cbv zeta. split; [|split; [|split; [|split; [|split]]]].
  - intros i i_in. simpl in i_in. repeat destruct i_in as [<- | i_in]; try contradiction; simpl; lra.
  - split; simpl; [intros u v | intros u v w]; rewrite !Nat.leb_le; lia.
  - split; reflexivity.
  - simpl. lia.
  - assert (evicted five_rows 0 (residents (bin five_rows 1 2 0)) = []) as after_0 by (vm_compute; reflexivity).
    assert (evicted five_rows 1 (residents (bin five_rows 1 2 1)) = []) as after_1 by (vm_compute; reflexivity).
    assert (evicted five_rows 2 (residents (bin five_rows 1 2 2)) = [1; 2]%nat) as after_2 by (vm_compute; reflexivity).
    assert (evicted five_rows 3 (residents (bin five_rows 1 2 3)) = [1; 2]%nat) as after_3 by (vm_compute; reflexivity).
    unfold missed. cbn [seq sum fold_right]. rewrite after_0, after_1, after_2, after_3. simpl. lra.
  - assert (evicted five_rows 0 (greedy five_rows (1 + 2 - 1) 0) = []) as after_0 by (vm_compute; reflexivity).
    assert (evicted five_rows 1 (greedy five_rows (1 + 2 - 1) 1) = []) as after_1 by (vm_compute; reflexivity).
    assert (evicted five_rows 2 (greedy five_rows (1 + 2 - 1) 2) = [2]%nat) as after_2 by (vm_compute; reflexivity).
    assert (evicted five_rows 3 (greedy five_rows (1 + 2 - 1) 3) = [2; 3]%nat) as after_3 by (vm_compute; reflexivity).
    unfold missed. cbn [seq sum fold_right]. rewrite after_0, after_1, after_2, after_3. simpl. lra.
Qed.
