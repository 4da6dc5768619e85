// Tile shapes of the Hopper backward.
#pragma once

namespace flash::sm90 {

// Where S^T of the next step is started: at its place, or beside the last products of this step.
enum class EarlyScores { kNone, kBeforeDq, kBehindDq };

struct BackwardTile {
  int block_m;    // queries of one step: 64, or 128 in two halves
  int block_n;    // keys of a tile: 64 for each consumer warpgroup
  int stages;     // of Q and of dO in shared memory
  int ds_stages;  // of dS
  int kv_stages;  // of K and V; 2: the next tile's are loaded beside this one's
  EarlyScores early_scores;
  bool k_in_registers, v_in_registers;  // as operands of S^T and dP^T, for all steps of a tile
};

// TFLOP/s on an H200 in bf16, 8192 tokens, full / causal: S^T at its place; before dQ, where the
// registers of head dim 128 do not suffice; behind dQ.
constexpr BackwardTile backward_tile(int headdim) {
  // 500 / 470; 518 / 481; 506 / 466
  if (headdim <= 64) return {128, 128, 2, 1, 2, EarlyScores::kBeforeDq, true, true};
  // 507 / 475; 511 / 487; 513 / 489
  if (headdim <= 96) return {64, 128, 2, 2, 1, EarlyScores::kBehindDq, false, true};
  // 584 / 540; -; 585 / 551
  return {64, 128, 2, 2, 1, EarlyScores::kBehindDq, false, false};
}

}  // namespace flash::sm90
