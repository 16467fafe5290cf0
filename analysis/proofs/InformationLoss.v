(* How much information evictions lose when scores decay.

   The paper (arXiv 2602.02197, Theorem 2.1) says: if k <= log(ε / A) / log(1 - λ), then the losses of k evictions add up
   to less than ε. Here A is a token's initial score, λ its decay in one step, k the age in steps at which a token goes,
   and the loss of an age t is A (1 - λ)^t. We prove

   - T21: the premise says the reverse of what is needed, and the conclusion is false whenever it holds;
   - R1:  the threshold that is right for one eviction a step;
   - R2:  the threshold for c tokens that leave the recycle bin together, at age k;
   - R3:  the bound on everything that c evicted tokens would still have received.

   R2 and R3 are about any scores that decay at least as fast as the envelope A (1 - λ)^t, and their bounds are attained. *)

From Coq Require Import Reals List Lra Lia.
From HAE Require Import Sums.
Import ListNotations.
Local Open Scope R_scope.

(* A score that starts at A or lower and loses at least the share λ in each step. *)
Definition decays (A λ : R) (score : nat -> R) : Prop :=
  score 0%nat <= A /\ forall t, score (S t) <= (1 - λ) * score t.

(* 1. Logarithms of powers *)

Lemma ln_below_one_is_negative : forall q, 0 < q < 1 -> ln q < 0.
Proof. intros q q_between. rewrite <- ln_1. apply ln_increasing; lra. Qed.

Lemma ln_monotone_iff : forall x y, 0 < x -> 0 < y -> (ln x <= ln y <-> x <= y).
Proof.
  intros x y x_positive y_positive. split; intros below.
  - destruct (Rle_lt_dec x y) as [|above]; [assumption |].
    pose proof (ln_increasing y x y_positive above). lra.
  - destruct below as [below | ->]; [|lra]. pose proof (ln_increasing x y x_positive below). lra.
Qed.

(* Dividing by a negative number turns an inequality round. *)
Lemma below_quotient_iff : forall a b n, n < 0 -> (a <= b / n <-> b <= a * n).
Proof.
  intros a b n n_negative. assert (b = b / n * n) as quotient by (field; lra). split; intros below.
  - rewrite quotient, !(Rmult_comm _ n). apply Rmult_le_compat_neg_l; lra.
  - apply Ropp_le_cancel, (Rmult_le_reg_r (- n)); lra.
Qed.

Lemma above_quotient_iff : forall a b n, n < 0 -> (b / n <= a <-> a * n <= b).
Proof.
  intros a b n n_negative. assert (b = b / n * n) as quotient by (field; lra). split; intros below.
  - rewrite quotient, !(Rmult_comm _ n). apply Rmult_le_compat_neg_l; lra.
  - apply Ropp_le_cancel, (Rmult_le_reg_r (- n)); lra.
Qed.

(* An exponent is below a quotient of logarithms of numbers below 1 exactly when the power is above. *)
Lemma power_above_iff : forall q x k, 0 < q < 1 -> 0 < x -> (INR k <= ln x / ln q <-> x <= q ^ k).
Proof.
  intros q x k q_between x_positive. pose proof (ln_below_one_is_negative q q_between).
  assert (0 < q ^ k) by (apply pow_lt; lra).
  rewrite below_quotient_iff by assumption. rewrite <- ln_pow by lra. now apply ln_monotone_iff.
Qed.

Lemma power_below_iff : forall q x k, 0 < q < 1 -> 0 < x -> (ln x / ln q <= INR k <-> q ^ k <= x).
Proof.
  intros q x k q_between x_positive. pose proof (ln_below_one_is_negative q q_between).
  assert (0 < q ^ k) by (apply pow_lt; lra).
  rewrite above_quotient_iff by assumption. rewrite <- ln_pow by lra. now apply ln_monotone_iff.
Qed.

(* 2. Geometric sums *)

Lemma geometric_sum : forall A λ first count, λ <> 0 ->
  (Σ t ∈ seq first count, A * (1 - λ) ^ t) = A * (1 - λ) ^ first * (1 - (1 - λ) ^ count) / λ.
Proof.
  intros A λ first count λ_not_zero. revert first.
  induction count as [|count IH]; intros first; simpl; [field; assumption |].
  rewrite IH. simpl. field. assumption.
Qed.

Lemma powers_fall : forall q s t, 0 < q < 1 -> (s <= t)%nat -> q ^ t <= q ^ s.
Proof.
  intros q s t q_between s_first. replace t with (s + (t - s))%nat by lia. rewrite pow_add.
  assert (0 < q ^ s) by (apply pow_lt; lra).
  assert (q ^ (t - s) <= 1) by (rewrite <- (pow1 (t - s)); apply pow_incr; lra).
  rewrite <- (Rmult_1_r (q ^ s)) at 2. apply Rmult_le_compat_l; lra.
Qed.

(* 3. Theorem 2.1 *)

(* For A = 1, λ = 1/10, ε = 1/2 and k = 6 the premise holds and the sum is more than eight times ε. *)
Theorem T21_refuted :
  INR 6 <= ln ((1 / 2) / 1) / ln (1 - 1 / 10) /\
  (Σ t ∈ seq 1 6, 1 * (1 - 1 / 10) ^ t) = 4.217031 /\
  ~ (Σ t ∈ seq 1 6, 1 * (1 - 1 / 10) ^ t) < 1 / 2.
Proof.
  assert ((Σ t ∈ seq 1 6, 1 * (1 - 1 / 10) ^ t) = 4.217031) as value by (simpl; lra).
  split; [|split; [assumption | rewrite value; lra]].
  apply power_above_iff; simpl; lra.
Qed.

(* The premise asks that the score at age k is still at least ε. *)
Theorem T21_premise_is_reversed :
  forall (A λ ε : R) (k : nat)
    (score_positive : 0 < A) (decay_between : 0 < λ < 1) (loss_positive : 0 < ε),
  INR k <= ln (ε / A) / ln (1 - λ) <-> ε <= A * (1 - λ) ^ k.
Proof.
  intros. assert (0 < ε / A) by (apply Rdiv_lt_0_compat; lra).
  rewrite power_above_iff by lra. split; intros below.
  - apply (Rmult_le_compat_l A) in below; [|lra].
    replace (A * (ε / A)) with ε in below by (field; lra). assumption.
  - apply (Rmult_le_reg_l A); [lra |]. replace (A * (ε / A)) with ε by (field; lra). assumption.
Qed.

(* Under the premise the losses add up to at least k ε, so the printed conclusion is false for every k >= 1, and for
   every k >= 2 also with <= in place of <. *)
Theorem T21_false_beyond_one :
  forall (A λ ε : R) (k : nat)
    (score_positive : 0 < A) (decay_between : 0 < λ < 1) (loss_positive : 0 < ε)
    (premise : INR k <= ln (ε / A) / ln (1 - λ)),
  INR k * ε <= (Σ t ∈ seq 1 k, A * (1 - λ) ^ t) /\
  ((1 <= k)%nat -> ~ (Σ t ∈ seq 1 k, A * (1 - λ) ^ t) < ε) /\
  ((2 <= k)%nat -> ~ (Σ t ∈ seq 1 k, A * (1 - λ) ^ t) <= ε).
Proof.
  intros. apply T21_premise_is_reversed in premise; [|assumption..].
  assert (INR k * ε <= (Σ t ∈ seq 1 k, A * (1 - λ) ^ t)) as at_least.
  { rewrite <- (seq_length k 1) at 1. rewrite <- sum_constant. apply sum_le. intros t t_in.
    apply in_seq in t_in. apply Rle_trans with (1 := premise). apply Rmult_le_compat_l; [lra |].
    apply powers_fall; [lra | lia]. }
  split; [assumption | split; intros k_large].
  - apply le_INR in k_large. simpl in k_large.
    assert (1 * ε <= INR k * ε) by (apply Rmult_le_compat_r; lra). lra.
  - apply le_INR in k_large. simpl in k_large.
    assert (2 * ε <= INR k * ε) by (apply Rmult_le_compat_r; lra). lra.
Qed.

(* The premise is no empty one: for any scores and any age some ε meets it. *)
Theorem T21_premise_can_hold :
  forall (A λ : R) (k : nat) (score_positive : 0 < A) (decay_between : 0 < λ < 1),
  exists ε : R, 0 < ε /\ INR k <= ln (ε / A) / ln (1 - λ).
Proof.
  intros. assert (0 < A * (1 - λ) ^ k) by (apply Rmult_lt_0_compat; [|apply pow_lt]; lra).
  exists (A * (1 - λ) ^ k). split; [assumption |]. apply T21_premise_is_reversed; lra.
Qed.

(* 4. R1: one eviction a step, at ages 1 to k *)

Theorem R1_sum :
  forall (A λ : R) (k : nat) (decays_at_all : λ <> 0),
  (Σ t ∈ seq 1 k, A * (1 - λ) ^ t) = A * (1 - λ) * (1 - (1 - λ) ^ k) / λ.
Proof. intros. rewrite geometric_sum by assumption. now rewrite pow_1. Qed.

Theorem R1_threshold :
  forall (A λ ε : R) (k : nat) (score_positive : 0 < A) (decay_between : 0 < λ < 1),
  (0 < 1 - ε * λ / (A * (1 - λ)) ->
   (Σ t ∈ seq 1 k, A * (1 - λ) ^ t) <= ε <-> INR k <= ln (1 - ε * λ / (A * (1 - λ))) / ln (1 - λ)) /\
  (1 - ε * λ / (A * (1 - λ)) <= 0 -> (Σ t ∈ seq 1 k, A * (1 - λ) ^ t) <= ε).
Proof.
  intros. set (first := A * (1 - λ)). assert (0 < first) by (apply Rmult_lt_0_compat; lra).
  assert ((Σ t ∈ seq 1 k, A * (1 - λ) ^ t) <= ε <-> 1 - ε * λ / first <= (1 - λ) ^ k) as below_iff.
  { rewrite R1_sum by lra. fold first.
    replace (first * (1 - (1 - λ) ^ k) / λ) with (first / λ * (1 - (1 - λ) ^ k)) by (field; lra).
    replace ε with (first / λ * (ε * λ / first)) at 1 by (field; lra).
    assert (0 < first / λ) by (apply Rdiv_lt_0_compat; lra). split; intros below.
    - apply Rmult_le_reg_l in below; lra.
    - apply Rmult_le_compat_l; lra. }
  split; intros argument; rewrite below_iff.
  - rewrite power_above_iff by lra. reflexivity.
  - assert (0 < (1 - λ) ^ k) by (apply pow_lt; lra). lra.
Qed.

(* 5. R2: c tokens that leave together at age k *)

Lemma below_envelope : forall A λ score t, 0 < λ < 1 -> decays A λ score -> score t <= A * (1 - λ) ^ t.
Proof.
  intros A λ score t decay_between [start step]. induction t as [|t IH]; simpl; [lra |].
  apply Rle_trans with (1 := step t). rewrite <- Rmult_assoc, (Rmult_comm A), Rmult_assoc.
  apply Rmult_le_compat_l; lra.
Qed.

Lemma envelope_decays : forall A λ, decays A λ (fun t => A * (1 - λ) ^ t).
Proof. intros A λ. split; simpl; [lra |]. intros t. lra. Qed.

(* The flushed tokens lose at most c A (1 - λ)^k, and there are decaying scores that lose as much. *)
Theorem R2_bound :
  forall (A λ : R) (flushed : list nat) (k : nat) (decay_between : 0 < λ < 1),
  (forall score : nat -> nat -> R,
     (forall j, In j flushed -> decays A λ (score j)) ->
     (Σ j ∈ flushed, score j k) <= INR (length flushed) * A * (1 - λ) ^ k) /\
  (exists score : nat -> nat -> R,
     (forall j, In j flushed -> decays A λ (score j)) /\
     (Σ j ∈ flushed, score j k) = INR (length flushed) * A * (1 - λ) ^ k).
Proof.
  intros. split.
  - intros score decaying. rewrite Rmult_assoc, <- (sum_constant (A * (1 - λ) ^ k) flushed). apply sum_le.
    intros j j_in. apply below_envelope; auto.
  - exists (fun _ t => A * (1 - λ) ^ t). split; [intros; apply envelope_decays |].
    rewrite sum_constant. ring.
Qed.

(* The bound is within ε from an age on: to wait longer helps. *)
Theorem R2_threshold :
  forall (A λ ε : R) (c k : nat)
    (tokens_positive : (1 <= c)%nat) (score_positive : 0 < A) (decay_between : 0 < λ < 1)
    (loss_positive : 0 < ε),
  INR c * A * (1 - λ) ^ k <= ε <-> ln (ε / (INR c * A)) / ln (1 - λ) <= INR k.
Proof.
  intros. apply le_INR in tokens_positive. simpl in tokens_positive.
  assert (0 < INR c * A) by (apply Rmult_lt_0_compat; lra).
  assert (0 < ε / (INR c * A)) by (apply Rdiv_lt_0_compat; lra).
  rewrite power_below_iff by lra.
  replace ε with (INR c * A * (ε / (INR c * A))) at 1 by (field; lra). split; intros below.
  - apply Rmult_le_reg_l in below; lra.
  - apply Rmult_le_compat_l; lra.
Qed.

(* 6. R3: everything still to come after age k *)

(* Over any horizon, the c tokens would have received at most c A (1 - λ)^(k+1) / λ. *)
Theorem R3_bound :
  forall (A λ : R) (evicted : list nat) (k horizon : nat) (score : nat -> nat -> R)
    (score_positive : 0 < A) (decay_between : 0 < λ < 1)
    (scores_decay : forall j, In j evicted -> decays A λ (score j)),
  (Σ t ∈ seq (k + 1) horizon, (Σ j ∈ evicted, score j t))
    <= INR (length evicted) * A * (1 - λ) ^ (k + 1) / λ.
Proof.
  intros. set (c := INR (length evicted)). assert (0 <= c) by apply pos_INR.
  apply Rle_trans with (Σ t ∈ seq (k + 1) horizon, c * A * (1 - λ) ^ t).
  - apply sum_le. intros t _. now apply R2_bound.
  - rewrite geometric_sum by lra. apply Rmult_le_compat_r; [apply Rlt_le, Rinv_0_lt_compat; lra |].
    assert (0 <= c * A * (1 - λ) ^ (k + 1)).
    { apply Rmult_le_pos; [apply Rmult_le_pos; lra |]. apply pow_le. lra. }
    assert (0 < (1 - λ) ^ horizon) by (apply pow_lt; lra).
    rewrite <- (Rmult_1_r (c * A * (1 - λ) ^ (k + 1))) at 2. apply Rmult_le_compat_l; lra.
Qed.

(* No smaller number bounds what c tokens on the envelope would have received over every horizon. *)
Theorem R3_supremum :
  forall (A λ : R) (c k : nat) (score_positive : 0 < A) (decay_between : 0 < λ < 1),
  is_lub (fun loss => exists horizon, loss = (Σ t ∈ seq (k + 1) horizon, INR c * (A * (1 - λ) ^ t)))
    (INR c * A * (1 - λ) ^ (k + 1) / λ).
Proof.
  intros. set (bound := INR c * A * (1 - λ) ^ (k + 1) / λ). assert (0 <= INR c) by apply pos_INR.
  assert (forall horizon,
    (Σ t ∈ seq (k + 1) horizon, INR c * (A * (1 - λ) ^ t)) = bound * (1 - (1 - λ) ^ horizon)) as closed_form.
  { intros horizon. rewrite sum_scaled, geometric_sum by lra. unfold bound. field. lra. }
  assert (0 <= bound).
  { unfold bound. apply Rmult_le_pos; [|apply Rlt_le, Rinv_0_lt_compat; lra].
    apply Rmult_le_pos; [apply Rmult_le_pos; lra |]. apply pow_le. lra. }
  split.
  - intros loss [horizon ->]. rewrite closed_form.
    assert (0 < (1 - λ) ^ horizon) by (apply pow_lt; lra).
    rewrite <- (Rmult_1_r bound) at 2. apply Rmult_le_compat_l; lra.
  - intros other is_bound. destruct (Rle_lt_dec bound other) as [|smaller]; [assumption | exfalso].
    assert (0 <= other).
    { apply is_bound. exists 0%nat. reflexivity. }
    (* After enough steps less than the gap is missing. *)
    assert (0 < (bound - other) / bound) by (apply Rdiv_lt_0_compat; lra).
    destruct (pow_lt_1_zero (1 - λ)) with (y := (bound - other) / bound) as [horizon near];
      [rewrite Rabs_right; lra | assumption |].
    specialize (near horizon (le_n _)).
    rewrite Rabs_right in near by (apply Rle_ge, pow_le; lra).
    assert (bound * (1 - (1 - λ) ^ horizon) <= other) as reached.
    { apply is_bound. exists horizon. now rewrite closed_form. }
    apply (Rmult_lt_compat_l bound) in near; [|lra].
    replace (bound * ((bound - other) / bound)) with (bound - other) in near by (field; lra). lra.
Qed.

Theorem R3_threshold :
  forall (A λ ε : R) (c k : nat)
    (tokens_positive : (1 <= c)%nat) (score_positive : 0 < A) (decay_between : 0 < λ < 1)
    (loss_positive : 0 < ε),
  INR c * A * (1 - λ) ^ (k + 1) / λ <= ε <-> ln (ε * λ / (INR c * A)) / ln (1 - λ) <= INR (k + 1).
Proof.
  intros. assert (0 < ε * λ) by (apply Rmult_lt_0_compat; lra).
  rewrite <- R2_threshold by assumption. split; intros below.
  - apply (Rmult_le_compat_r λ) in below; [|lra].
    replace (INR c * A * (1 - λ) ^ (k + 1) / λ * λ) with (INR c * A * (1 - λ) ^ (k + 1)) in below
      by (field; lra). assumption.
  - apply (Rmult_le_reg_r λ); [lra |].
    replace (INR c * A * (1 - λ) ^ (k + 1) / λ * λ) with (INR c * A * (1 - λ) ^ (k + 1)) by (field; lra).
    assumption.
Qed.
