// Attention forward for Ampere-class tensor cores: FlashAttention-2 (Dao 2023, arXiv:2307.08691).
//
// A thread block takes one block of queries of one head and walks over the blocks of keys that they
// see, or over a part of those. A team of one or two warps owns some of the queries; scores and
// output stay in registers.
//
// Rows past the end of a sequence are zero when loaded, whatever memory holds there. A key inside
// the sequence that the mask hides from a query has probability 0, but in a block that other keys
// make visible its V row is still multiplied: NaN or Inf stored there does reach the output.
#pragma once

#include "common/divisor.h"
#include "common/dropout.h"
#include "common/mask.h"
#include "common/pack.h"
#include "common/paged_rows.h"
#include "common/range.h"
#include "common/scores.h"
#include "common/sequence.h"
#include "common/shared_address.h"
#include "common/softmax.h"
#include "common/warp.h"
#include "common/warp_matmul.h"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/opaque.h"
#include "sm80/forward_config.cuh"
#include "sm80/forward_parts.cuh"
#include "sm80/row_team.cuh"
#include "sm80/shared_tile.cuh"

namespace flash::sm80 {

// O += P V with P = exp(S), 16 keys at a time: while the tensor cores multiply by one part of P,
// the next is computed. The accumulators of two neighbouring key tiles, once rounded to T, are an A
// operand: no data moves between lanes. What a team's warps have of P they give each other through
// shared memory.
// out: (kTeamRows / 16, kHeadDimV / 8 / kTeam), scores: (kTeamRows / 16, kWarpKeys / 8)
// accumulators of m16n8
// v: shared address of the (kBlockN, kHeadDimV) tile
// dropped_of_block(m, n): what dropout drops of the probabilities [m][2 * n], [m][2 * n + 1]
// (DroppedOfBlock or NothingDropped)
template <typename Config, int kRowTiles, int kOutTiles, int kColTiles, typename DroppedOf>
__device__ void accumulate_output(float (&out)[kRowTiles][kOutTiles][4],
                                  SoftmaxState<kRowTiles>& softmax,
                                  const float (&scores)[kRowTiles][kColTiles][4], uint32_t v,
                                  DroppedOf dropped_of_block, const RowTeam<Config::kTeam>& team,
                                  typename Config::Exchange& exchange, int lane) {
  using T = typename Config::T;
  using Layout = TileLayout<Config::kHeadDimV>;
  constexpr int kTeam = Config::kTeam;
  constexpr int kWarpBytes = Config::kWarpKeys * Layout::kRowBytes;
  // Of each two blocks of 16 columns, each warp of a team of two takes one.
  v += Layout::in_block(Layout::by_columns(lane), 0, team.rank);
#pragma unroll
  for (int n = 0; n < kColTiles; n += 2) {
    uint32_t p[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const auto dropped = dropped_of_block(m, n / 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = i % 2 * 2, tile = n + i / 2;
        const float low = softmax.exponentiate(scores[m][tile][j], m, j);
        const float high = softmax.exponentiate(scores[m][tile][j + 1], m, j + 1);
        p[m][i] = dropped.keep(pack(low, high, T()), i / 2, j);
      }
      if constexpr (kTeam > 1) {
        exchange.p[team.rank][n / 2][m][lane] = make_uint4(p[m][0], p[m][1], p[m][2], p[m][3]);
      }
    }
    multiply_by_values<T, Config::kHeadDimV, kTeam>(out, p, v + team.rank * kWarpBytes, n / 2);
  }
  if constexpr (kTeam > 1) {
    team.wait();
#pragma unroll
    for (int n = 0; n < kColTiles; n += 2) {
      uint32_t p[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const uint4 other = exchange.p[1 - team.rank][n / 2][m][lane];
        p[m][0] = other.x, p[m][1] = other.y, p[m][2] = other.z, p[m][3] = other.w;
      }
      multiply_by_values<T, Config::kHeadDimV, kTeam>(out, p, v + (1 - team.rank) * kWarpBytes,
                                                      n / 2);
    }
  }
}

// Grid: (nheads, query blocks * parts, batch), see launch_forward and QueryBlock.
// params.window_left and window_right are bounded_window's.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    forward_kernel(const __grid_constant__ ForwardParams params,
                   const __grid_constant__ SequenceTiles tiles, Divisor page_size,
                   int first_m_block, int first_batch, float scale_log2) {
  using T = typename Config::T;
  constexpr bool kFull = Config::kFeatures == FeatureSet::kFull;
  constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTeam = Config::kTeam;
  constexpr int kTeamRows = Config::kTeamRows, kRowTiles = kTeamRows / 16;
  constexpr int kWarpKeys = Config::kWarpKeys, kColTiles = kWarpKeys / 8;
  constexpr int kOutTiles = kHeadDimV / 8 / kTeam;
  static_assert(kTeamRows % 16 == 0 && kWarpKeys % 16 == 0 && kHeadDimV <= kHeadDim);
  using QLoader = TileLoader<T, kBlockM, kHeadDim, Config::kThreads, kFull>;
  using KLoader = TileLoader<T, kBlockN, kHeadDim, Config::kThreads, kFull>;
  using VLoader = TileLoader<T, kBlockN, kHeadDimV, Config::kThreads, kFull>;

  // Indices.
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int team_begin = warp / kTeam * kTeamRows;  // its first row in the thread block
  const int head = blockIdx.x;
  const int head_kv = head / (params.nheads / params.nheads_kv);
  const int splits = Config::kDivided ? params.num_splits : 1;
  const int part = blockIdx.y % splits;
  const auto find_block = [&] {
    return QueryBlock::find(params, tiles, first_batch + blockIdx.z, first_m_block,
                            gridDim.y / splits, ptx::opaque(static_cast<int>(blockIdx.y)) / splits);
  };
  const QueryBlock block = find_block();
  const int batch = block.batch, m_begin = block.begin;
  const Sequence sequence(params, batch);
  if (m_begin < 0 || m_begin >= sequence.seqlen_q) return;
  const int m_end = min(m_begin + kBlockM, sequence.seqlen_q);

  // The main loop knows queries by their positions among the keys, so the shift of the mask is 0,
  // and keys up to the last visible one.
  const int m_position = m_begin + sequence.seqlen_k - sequence.seqlen_q;
  const int position = m_position + team_begin + lane / 4;  // of the lane's first row
  Mask mask{sequence.seqlen_k, 0, params.window_left, params.window_right};
  const Range part_keys = keys_of_part<kBlockN>({mask.first_key(m_position) / kBlockN * kBlockN,
                                                 mask.end_key(m_position + m_end - m_begin - 1)},
                                                part, splits);
  const int n_start = warp_uniform(part_keys.begin), n_end = warp_uniform(part_keys.end);
  mask.seqlen_k = n_end;

  // Shared memory.
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  T* const team_rows = shared.q + team_begin * kHeadDim;
  const uint32_t shared_team_q = shared_address(team_rows);
  const uint32_t shared_k = shared_address(shared.k);
  const uint32_t shared_v = shared_address(shared.v);
  auto& exchange = shared.exchange[warp / kTeam];  // not there if kTeam is 1

  RowTeam<kTeam> team;
  if constexpr (kTeam == 2) team = {warp % 2, 1 + warp / 2, &exchange.rows[0][0], lane};
  float out[kRowTiles][kOutTiles][4] = {};
  float sinks[2 * kRowTiles];
  const bool has_sink = params.s_aux != nullptr && part == 0;
  for (float& sink : sinks) sink = has_sink ? params.s_aux[head] : -INFINITY;
  SoftmaxState<kRowTiles> softmax(scale_log2, sinks, lane % 4 == 0 && team.rank == 0);
  const ScoreTransform transform(params, batch, head, mask.shift);
  const Dropout dropout(params, batch, head);

  // Main loop. V is on its way during the first matmul, the next K during the second.
  const int first_key = sequence.k_first + n_start;
  KLoader k_loader(rows_of<const T>(params.k, sequence.k_batch, first_key, head_kv),
                   params.k.row_stride, params.headdim, params.aligned, threadIdx.x);
  VLoader v_loader(rows_of<const T>(params.v, sequence.k_batch, first_key, head_kv),
                   params.v.row_stride, params.headdim_v, params.aligned, threadIdx.x);
  const auto load_keys = [&](auto& loader, uint32_t tile, const Operand& operand, int key) {
    if (Config::kPaged && params.block_table != nullptr) {
      loader.load_scattered(tile, n_end - key, rows_of<const T>(operand, 0, 0, head_kv),
                            [&](int row) {
                              return PagedRows(params, page_size, batch)
                                  .offset(operand, sequence.k_first + key + row);
                            });
    } else {
      loader.load(tile, n_end - key);
    }
  };
  if (n_start < n_end) {
    QLoader q_loader(rows_of<const T>(params.q, sequence.q_batch, sequence.q_first + m_begin, head),
                     params.q.row_stride, params.headdim, params.aligned, threadIdx.x);
    q_loader.load(shared_address(shared.q), m_end - m_begin);
    load_keys(k_loader, shared_k, params.k, n_start);
  }
  for (Walk<kBlockN> keys({n_start, n_end}); keys.valid(); keys.advance()) {
    const int n_begin = keys.place();
    const int warp_n_begin = n_begin + team.rank * kWarpKeys;
    ptx::cp_async_wait_all();
    __syncthreads();  // K has arrived; every warp is done with the last V
    load_keys(v_loader, shared_v, params.v, n_begin);

    float scores[kRowTiles][kColTiles][4];
    compute_scores<T, kHeadDim>(scores, shared_team_q,
                                shared_k + team.rank * kWarpKeys * TileLayout<kHeadDim>::kRowBytes,
                                lane);
    const int row = ptx::opaque(position);  // or the mask's bounds would occupy registers
    const int key = warp_n_begin + lane % 4 * 2;
    const auto mask_scores = [&] {
      if (!mask.cuts(row - lane / 4, kTeamRows, n_begin, kBlockN)) return;
      const auto row_of = [row](int m, int half) { return row + m * 16 + half * 8; };
      apply_mask(scores, mask, row_of, key);
    };
    if constexpr (kFull) {
      transform.apply(scores, row, key, mask_scores, [](int, int, int, float) {});
    }
    mask_scores();
    float factors[2 * kRowTiles];
    if (follow_maxima(softmax, scores, factors, team)) rescale_output(out, factors);

    ptx::cp_async_wait_all();
    __syncthreads();  // V has arrived; every warp is done with K
    if (keys.has_next()) load_keys(k_loader, shared_k, params.k, keys.next());
    if (kFull && dropout.enabled) {
      const auto dropped_of_block = [&](int m, int n) {
        return dropout.dropped((m_begin + team_begin) / 16 + m, warp_n_begin / 16 + n, lane);
      };
      accumulate_output<Config>(out, softmax, scores, shared_v, dropped_of_block, team, exchange,
                                lane);
    } else {
      const auto nothing_dropped = [](int, int) { return NothingDropped(); };
      accumulate_output<Config>(out, softmax, scores, shared_v, nothing_dropped, team, exchange,
                                lane);
    }
  }

  // Epilogue. What it needs of the sequence is found again instead of occupying registers.
  const Sequence target(params, find_block().batch);
  const int team_m_begin = warp_uniform(position) - (target.seqlen_k - target.seqlen_q);
  const int valid_rows = target.seqlen_q - team_m_begin;
  if constexpr (Config::kDivided) {
    const int64_t index = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int first_row = team_m_begin % kBlockM;
    team.sum(softmax.sum);
    WorkspacePart<kBlockM, kHeadDimV>(params, index)
        .leave(
            softmax, out, first_row, first_row + valid_rows, team.rank == 0,
            [&](int n) { return team.col_tile(n); }, ptx::opaque(lane));
    return;
  }
  float factors[2 * kRowTiles], lse[2 * kRowTiles];
  finish_rows(softmax, kFull && dropout.enabled ? dropout.scale : 1.f, factors, lse, team);
  rescale_output(out, factors);
  // Only this team reads its rows of shared.q, so they can take its output.
  store_fragments<kHeadDimV>(
      out, team_rows, [](int m) { return m; }, [&](int n) { return team.col_tile(n); }, lane);
  __syncwarp();
  team.wait();
  store_tile<kTeamRows, kHeadDimV, kTeam * 32, kFull>(
      team_rows, rows_of<T>(params.out, target.q_batch, target.q_first + team_m_begin, head),
      params.out.row_stride, valid_rows, params.headdim_v, params.aligned, team.rank * 32 + lane);
  if (lane % 4 == 0 && team.rank == 0) {
    float* const lse_rows = params.lse + target.q_batch * params.lse_batch_stride +
                            head * params.lse_head_stride + target.q_first + team_m_begin;
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {
      const int row = r * 8 + lane / 4;
      if (row < valid_rows) lse_rows[row] = lse[r];
    }
  }
}

}  // namespace flash::sm80
