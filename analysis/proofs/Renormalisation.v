(* What eviction does to one row of attention, when it acts through renormalisation alone.

   A row is a list of tokens with probabilities a. Some tokens are evicted; the missed mass m is what they would have
   received. The cache attends to the others with a' = a / (1 - m). We prove, for m < 1,

   - a' is a probability distribution over the residents;
   - the total variation between a and a' is m, and the Kullback-Leibler divergence of a' from a is -ln (1 - m);
   - the error of the attention's output is m times the difference of the two mean values, evicted and resident, so its
     length is at most m times the diameter of the values, and p / (1 - p) times the distance of the output from the
     value of the token, when one token of probability p is evicted.

   The paper (arXiv 2602.02197) counts evicted scores as loss; these identities say what a lost mass does to a row. *)

From Coq Require Import Reals List Lra Lia Permutation.
From HAE Require Import Sums.
Import ListNotations.
Local Open Scope R_scope.

Definition distribution (row : list nat) (p : nat -> R) : Prop :=
  (forall j, In j row -> 0 <= p j) /\ (Σ j ∈ row, p j) = 1.

(* A row's tokens that were evicted, and those that are resident. *)
Definition gone (row : list nat) (evicted : nat -> bool) : list nat := filter evicted row.
Definition resident (row : list nat) (evicted : nat -> bool) : list nat := filter (fun j => negb (evicted j)) row.

Definition missed_mass (row : list nat) (evicted : nat -> bool) (a : nat -> R) : R := Σ j ∈ gone row evicted, a j.

(* a': what is evicted receives nothing, the rest is divided by its own sum. *)
Definition renormalised (row : list nat) (evicted : nat -> bool) (a : nat -> R) (j : nat) : R :=
  if evicted j then 0 else a j / (Σ k ∈ resident row evicted, a k).

(* Of distributions p and q, 0 ln 0 being 0. *)
Definition divergence (row : list nat) (p q : nat -> R) : R :=
  Σ j ∈ row, (if Rlt_dec 0 (p j) then p j * ln (p j / q j) else 0).

(* Coordinate i of the attention's output; v j i is coordinate i of token j's value. *)
Definition output (row : list nat) (p : nat -> R) (v : nat -> nat -> R) (i : nat) : R := Σ j ∈ row, p j * v j i.

(* The mean value of some tokens, weighted by their probabilities. *)
Definition mean (tokens : list nat) (a : nat -> R) (v : nat -> nat -> R) (i : nat) : R :=
  (Σ j ∈ tokens, a j * v j i) / (Σ j ∈ tokens, a j).

(* Euclidean length in d dimensions, and distance. *)
Definition norm (d : nat) (x : nat -> R) : R := sqrt (Σ i ∈ seq 0 d, (x i)²).
Definition distance (d : nat) (x y : nat -> R) : R := norm d (fun i => x i - y i).

(* 1. Euclidean length *)

Lemma sum_of_squares_nonnegative : forall d x, 0 <= (Σ i ∈ seq 0 d, (x i)²).
Proof. intros d x. apply sum_nonnegative. intros i _. apply Rle_0_sqr. Qed.

Lemma norm_nonnegative : forall d x, 0 <= norm d x.
Proof. intros d x. apply sqrt_pos. Qed.

Lemma norm_squared : forall d x, norm d x * norm d x = (Σ i ∈ seq 0 d, (x i)²).
Proof. intros d x. apply sqrt_sqrt, sum_of_squares_nonnegative. Qed.

Lemma norm_ext : forall d x y, (forall i, x i = y i) -> norm d x = norm d y.
Proof. intros d x y equal. unfold norm. f_equal. apply sum_ext. intros i _. now rewrite equal. Qed.

Lemma norm_scaled : forall d c x, norm d (fun i => c * x i) = Rabs c * norm d x.
Proof.
  intros d c x. unfold norm.
  rewrite (sum_ext _ (fun i => c² * (x i)²)) by (intros i _; apply Rsqr_mult).
  rewrite sum_scaled, sqrt_mult by (apply Rle_0_sqr || apply sum_of_squares_nonnegative).
  now rewrite sqrt_Rsqr_abs.
Qed.

(* The inequality of Cauchy and Schwarz, where u is not zero. *)
Lemma product_below_lengths : forall d x u, 0 < norm d u ->
  (Σ i ∈ seq 0 d, x i * u i) <= norm d x * norm d u.
Proof.
  intros d x u u_positive. set (xu := Σ i ∈ seq 0 d, x i * u i). set (uu := norm d u * norm d u).
  assert (0 < uu) by (apply Rmult_lt_0_compat; assumption).
  (* The squared length of x - (xu / uu) u is not negative. *)
  assert (0 <= norm d x * norm d x - xu * xu / uu) as square.
  { pose proof (sum_of_squares_nonnegative d (fun i => x i + (- (xu / uu)) * u i)) as square.
    rewrite (sum_ext _ (fun i => ((x i)² + - (2 * (xu / uu)) * (x i * u i)) + (xu / uu)² * (u i)²)) in square
      by (intros i _; unfold Rsqr; ring).
    rewrite !sum_plus, !sum_scaled, <- !norm_squared in square. fold xu uu in square.
    replace (norm d x * norm d x - xu * xu / uu)
      with (norm d x * norm d x + - (2 * (xu / uu)) * xu + (xu / uu)² * uu)
      by (unfold Rsqr; field; lra). assumption. }
  assert (xu * xu <= (norm d x * norm d u) * (norm d x * norm d u)) as squares.
  { replace ((norm d x * norm d u) * (norm d x * norm d u)) with (norm d x * norm d x * uu) by (unfold uu; ring).
    apply (Rmult_le_compat_r uu) in square; [|lra].
    replace ((norm d x * norm d x - xu * xu / uu) * uu) with (norm d x * norm d x * uu - xu * xu) in square
      by (field; lra). lra. }
  apply Rsqr_incr_0_var; [exact squares |].
  apply Rmult_le_pos; apply norm_nonnegative.
Qed.

Section Row.
Variables (row : list nat) (evicted : nat -> bool) (a : nat -> R).
Hypothesis a_is_distribution : distribution row a.

Notation m := (missed_mass row evicted a).
Notation a' := (renormalised row evicted a).

(* 2. The residents' distribution *)

Lemma kept_mass : (Σ j ∈ resident row evicted, a j) = 1 - m.
Proof.
  destruct a_is_distribution as [_ total]. pose proof (sum_split a evicted row) as split.
  unfold missed_mass, gone, resident. change (fun j => a j) with a in *. lra.
Qed.

Lemma missed_mass_nonnegative : 0 <= m.
Proof.
  apply sum_nonnegative. intros j j_in. apply filter_In in j_in. now apply a_is_distribution.
Qed.

Lemma expectation_split : forall f,
  (Σ j ∈ row, a j * f j) = (Σ j ∈ gone row evicted, a j * f j) + (Σ j ∈ resident row evicted, a j * f j).
Proof. intros f. apply (sum_split (fun j => a j * f j)). Qed.

Lemma renormalised_expectation : forall f,
  (Σ j ∈ row, a' j * f j) = (Σ j ∈ resident row evicted, a j * f j) / (1 - m).
Proof.
  intros f. unfold Rdiv. rewrite Rmult_comm, <- sum_scaled. unfold resident. rewrite sum_filter.
  apply sum_ext. intros j _. unfold renormalised. rewrite kept_mass. destruct (evicted j); simpl; unfold Rdiv; ring.
Qed.

Theorem residents_form_a_distribution :
  forall (some_mass_left : m < 1),
  distribution row a' /\ (forall j, evicted j = true -> a' j = 0).
Proof.
  intros. split; [split |].
  - intros j j_in. unfold renormalised. rewrite kept_mass. destruct (evicted j); [lra |].
    apply Rmult_le_pos; [now apply a_is_distribution | apply Rlt_le, Rinv_0_lt_compat; lra].
  - rewrite (sum_ext _ (fun j => a' j * 1)) by (intros; ring).
    rewrite renormalised_expectation, (sum_ext _ (fun j => a j)) by (intros; ring).
    rewrite kept_mass. field. lra.
  - intros j is_evicted. unfold renormalised. now rewrite is_evicted.
Qed.

(* Half the sum of the differences. *)
Theorem total_variation_is_missed_mass :
  forall (some_mass_left : m < 1),
  (Σ j ∈ row, Rabs (a j - a' j)) / 2 = m.
Proof.
  intros. rewrite (sum_split _ evicted).
  assert ((Σ j ∈ gone row evicted, Rabs (a j - a' j)) = m) as of_the_evicted.
  { apply sum_ext. intros j j_in. apply filter_In in j_in. destruct j_in as [j_in is_evicted].
    unfold renormalised. rewrite is_evicted, Rminus_0_r. apply Rabs_right, Rle_ge. now apply a_is_distribution. }
  assert ((Σ j ∈ resident row evicted, Rabs (a j - a' j)) = m) as of_the_residents.
  { (* A resident's probability grows by the share m / (1 - m) of itself. *)
    rewrite (sum_ext _ (fun j => m / (1 - m) * a j)).
    - rewrite sum_scaled, kept_mass. field. lra.
    - intros j j_in. apply filter_In in j_in. destruct j_in as [j_in is_resident].
      apply Bool.negb_true_iff in is_resident. unfold renormalised. rewrite is_resident, kept_mass.
      replace (a j - a j / (1 - m)) with (- (m / (1 - m) * a j)) by (field; lra).
      rewrite Rabs_Ropp. apply Rabs_right, Rle_ge, Rmult_le_pos; [|now apply a_is_distribution].
      apply Rmult_le_pos; [apply missed_mass_nonnegative | apply Rlt_le, Rinv_0_lt_compat; lra]. }
  unfold gone, resident in of_the_evicted, of_the_residents. rewrite of_the_evicted, of_the_residents. lra.
Qed.

(* No term divides by zero: where a' is positive, a is. *)
Theorem kl_is_log_of_kept_mass :
  forall (some_mass_left : m < 1),
  divergence row a' a = - ln (1 - m) /\ (forall j, In j row -> 0 < a' j -> 0 < a j).
Proof.
  intros. assert (forall j, In j row -> 0 < a' j -> 0 < a j /\ a' j = a j / (1 - m)) as positive.
  { intros j j_in. unfold renormalised. rewrite kept_mass. destruct (evicted j); [lra |]. intros quotient.
    split; [|reflexivity]. replace (a j) with (a j / (1 - m) * (1 - m)) by (field; lra).
    apply Rmult_lt_0_compat; lra. }
  split; [|intros j j_in quotient; now apply positive].
  unfold divergence. rewrite (sum_ext _ (fun j => - ln (1 - m) * a' j)).
  - destruct (residents_form_a_distribution some_mass_left) as [[_ total] _].
    rewrite sum_scaled. change (sum a' row) with (Σ j ∈ row, a' j). rewrite total. ring.
  - intros j j_in. destruct (Rlt_dec 0 (a' j)) as [quotient | not_positive].
    + destruct (positive j j_in quotient) as [a_positive value].
      replace (a' j / a j) with (/ (1 - m)) by (rewrite value; field; lra).
      rewrite ln_Rinv by lra. ring.
    + destruct (residents_form_a_distribution some_mass_left) as [[nonnegative _] _].
      specialize (nonnegative j j_in). replace (a' j) with 0 by lra. ring.
Qed.

(* 3. The output's error *)

Variable v : nat -> nat -> R.

Theorem output_error_identity :
  forall (some_mass_missed : 0 < m) (some_mass_left : m < 1) (i : nat),
  output row a v i - output row a' v i =
    m * (mean (gone row evicted) a v i - mean (resident row evicted) a v i).
Proof.
  intros. unfold output, mean. rewrite (expectation_split (fun j => v j i)), (renormalised_expectation (fun j => v j i)).
  rewrite kept_mass. fold m. field. lra.
Qed.

(* Of any function on the tokens, the two expectations differ by at most m times its greatest difference. *)
Lemma expectations_differ_by : forall f bound, m < 1 ->
  (forall j k, In j row -> In k row -> f j - f k <= bound) ->
  (Σ j ∈ row, a j * f j) - (Σ j ∈ row, a' j * f j) <= m * bound.
Proof.
  intros f bound some_mass_left differ. rewrite expectation_split, renormalised_expectation.
  set (of_gone := Σ j ∈ gone row evicted, a j * f j). set (of_resident := Σ j ∈ resident row evicted, a j * f j).
  assert (of_gone * (1 - m) - m * of_resident <= m * bound * (1 - m)) as scaled.
  { (* Both sides are sums over pairs of an evicted and a resident token. *)
    assert ((Σ j ∈ gone row evicted, (Σ k ∈ resident row evicted, a j * (a k * (f j - f k))))
      = of_gone * (1 - m) - m * of_resident) as left_side.
    { rewrite (sum_ext _ (fun j => (1 - m) * (a j * f j) + - of_resident * a j)).
      - rewrite sum_plus, !sum_scaled. fold of_gone. unfold missed_mass. ring.
      - intros j _. rewrite sum_scaled.
        rewrite (sum_ext _ (fun k => f j * a k + - 1 * (a k * f k))) by (intros; ring).
        rewrite sum_plus, !sum_scaled. fold of_resident. rewrite kept_mass. ring. }
    assert ((Σ j ∈ gone row evicted, (Σ k ∈ resident row evicted, a j * (a k * bound))) = m * bound * (1 - m))
      as right_side.
    { rewrite (sum_ext _ (fun j => bound * (1 - m) * a j)).
      - rewrite sum_scaled. unfold missed_mass. ring.
      - intros j _. rewrite sum_scaled, (sum_ext _ (fun k => bound * a k)) by (intros; ring).
        rewrite sum_scaled, kept_mass. ring. }
    rewrite <- left_side, <- right_side. apply sum_le. intros j j_in. apply sum_le. intros k k_in.
    apply filter_In in j_in, k_in.
    apply Rmult_le_compat_l; [now apply a_is_distribution |].
    apply Rmult_le_compat_l; [now apply a_is_distribution | now apply differ]. }
  apply (Rmult_le_reg_r (1 - m)); [lra |].
  replace ((of_gone + of_resident - of_resident / (1 - m)) * (1 - m)) with (of_gone * (1 - m) - m * of_resident)
    by (field; lra). assumption.
Qed.

(* The bound holds at m = 0 too; its least instance is the diameter of the values. *)
Theorem output_error_diameter :
  forall (d : nat) (diameter : R)
    (some_mass_left : m < 1)
    (values_within_diameter : forall j k, In j row -> In k row -> distance d (v j) (v k) <= diameter),
  distance d (output row a v) (output row a' v) <= m * diameter.
Proof.
  intros. assert (0 <= diameter).
  { (* The row is not empty, and a value has no distance from itself. *)
    destruct row as [|j rest]; [destruct a_is_distribution as [_ total]; simpl in total; lra |].
    apply Rle_trans with (distance d (v j) (v j)); [apply norm_nonnegative | apply values_within_diameter; now left]. }
  unfold distance. set (u := fun i => output row a v i - output row a' v i).
  destruct (norm_nonnegative d u) as [u_positive | u_zero];
    [| rewrite <- u_zero; apply Rmult_le_pos; [apply missed_mass_nonnegative | assumption]].
  (* Along the error itself the values differ by no more than their distance. *)
  assert (norm d u * norm d u <= m * (diameter * norm d u)).
  { rewrite norm_squared.
    replace (Σ i ∈ seq 0 d, (u i)²)
      with ((Σ j ∈ row, a j * (Σ i ∈ seq 0 d, v j i * u i)) - (Σ j ∈ row, a' j * (Σ i ∈ seq 0 d, v j i * u i))).
    - apply expectations_differ_by; [assumption |]. intros j k j_in k_in.
      replace ((Σ i ∈ seq 0 d, v j i * u i) - (Σ i ∈ seq 0 d, v k i * u i))
        with (Σ i ∈ seq 0 d, (v j i - v k i) * u i).
      + apply Rle_trans with (1 := product_below_lengths d _ u u_positive).
        apply Rmult_le_compat_r; [lra |]. now apply values_within_diameter.
      + rewrite (sum_ext _ (fun i => v j i * u i + - 1 * (v k i * u i))) by (intros; ring).
        rewrite sum_plus, sum_scaled. ring.
    - assert (forall p, (Σ j ∈ row, p j * (Σ i ∈ seq 0 d, v j i * u i)) = (Σ i ∈ seq 0 d, output row p v i * u i))
        as along.
      { intros p. rewrite (sum_ext _ (fun j => Σ i ∈ seq 0 d, p j * (v j i * u i)))
          by (intros; now rewrite sum_scaled).
        rewrite sum_swap. apply sum_ext. intros i _. unfold output. rewrite Rmult_comm, <- sum_scaled.
        apply sum_ext. intros. ring. }
      rewrite !along.
      rewrite (sum_ext (fun i => (u i)²) (fun i => output row a v i * u i + - 1 * (output row a' v i * u i)))
        by (intros; unfold Rsqr; unfold u at 1; ring).
      rewrite sum_plus, sum_scaled. ring. }
  apply (Rmult_le_reg_r (norm d u)); [assumption |]. lra.
Qed.

Theorem output_error_of_one_token :
  forall (d token : nat)
    (one_token_evicted : gone row evicted = [token]) (some_mass_left : a token < 1),
  distance d (output row a v) (output row a' v) = a token / (1 - a token) * distance d (output row a v) (v token).
Proof.
  intros. assert (m = a token) as missed by (unfold missed_mass; rewrite one_token_evicted; simpl; ring).
  pose proof missed_mass_nonnegative as nonnegative. rewrite missed in nonnegative.
  unfold distance. set (p := a token) in *.
  rewrite (norm_ext d _ (fun i => - (p / (1 - p)) * (output row a v i - v token i))).
  - rewrite norm_scaled, Rabs_Ropp, Rabs_right; [reflexivity |].
    apply Rle_ge, Rmult_le_pos; [assumption | apply Rlt_le, Rinv_0_lt_compat; lra].
  - intros i. unfold output.
    rewrite (expectation_split (fun j => v j i)), (renormalised_expectation (fun j => v j i)), missed.
    rewrite one_token_evicted. simpl sum. fold p. field. lra.
Qed.

End Row.

(* The hypotheses can be met together: two tokens of probability 1/2 each, of which one is evicted. *)
Theorem a_row_with_half_its_mass_missed :
  distribution [0%nat; 1%nat] (fun _ => 1 / 2) /\
  missed_mass [0%nat; 1%nat] (Nat.eqb 1) (fun _ => 1 / 2) = 1 / 2 /\
  gone [0%nat; 1%nat] (Nat.eqb 1) = [1%nat].
Proof.
  split; [split; [intros; lra | simpl; lra] | split; [|reflexivity]].
  unfold missed_mass, gone. simpl. lra.
Qed.
