// How a warp of the decode kernel brings its keys and values to shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/sequence.h"
#include "params.h"
#include "ptx/cp_async.h"

namespace flash::decode {

// A warp's blocks of kBlockN keys of one head of a sequence: from key `first` on each kWarps-th, as
// far as they begin before `end`. Blocks are loaded in order, of each first the keys and then the
// values. Rows from `end` on become zero and are not read. Of a warpgroup, whose warps share keys,
// each warp loads as many blocks.
//
// Each lane knows the place of one of 32 rows, and gives it to the lanes that copy the row. So
// pages may have any size, and what the block table says is asked for 32 rows in advance.
template <typename Config>
class KeyLoader {
  using KV = typename Config::KV;
  static constexpr int kBlockN = Config::kBlockN;
  static_assert(32 % kBlockN == 0);

 public:
  // sequence: not empty if first < end. page_shift: log2 of the page size, or -1
  __device__ KeyLoader(const ForwardParams& params, const Sequence& sequence, int batch,
                       int head_kv, int page_shift, int first, int end, int lane)
      : params_(params),
        table_(params.block_table == nullptr
                   ? nullptr
                   : params.block_table + batch * params.block_table_stride),
        k_batch_(sequence.k_batch),
        k_first_(sequence.k_first),
        head_kv_(head_kv),
        page_shift_(page_shift),
        end_(end),
        lane_(lane),
        before_(Config::kWarpgroup ? threadIdx.x / 32 * kBlockN : 0),
        key_(first) {
    if (is_behind()) return;
    place_ = find(0);
    next_place_ = find(32);
  }

  // Starts the copy of the next block's keys or values, as a group of copies; the group is empty
  // behind the last block.
  // slot: shared address
  template <bool kValues>
  __device__ void load(uint32_t slot) {
    if (!is_behind()) copy<kValues>(slot);
    ptx::cp_async_commit();
    if constexpr (kValues) advance();
  }

 private:
  // A row of K and V; of pages `slot` is as the block table says: not clamped yet.
  struct Place {
    int slot, row;
  };

  // Whether no block is left.
  __device__ bool is_behind() const { return key_ - before_ >= end_; }

  // Of the row that is `ahead` and the lane behind the warp's next.
  __device__ Place find(int ahead) const {
    const int i = ahead + lane_;
    const int key = key_ + i / kBlockN * Config::kStepKeys + i % kBlockN;
    const int row = k_first_ + min(key, end_ - 1);
    if (table_ == nullptr) return {k_batch_, row};
    const int page = page_shift_ >= 0 ? row >> page_shift_ : row / params_.page_size;
    return {table_[page], row - page * params_.page_size};
  }

  template <bool kValues>
  __device__ void copy(uint32_t slot) const {
    using Layout =
        std::conditional_t<kValues, typename Config::ValueLayout, typename Config::KeyLayout>;
    constexpr int kElements = 16 / sizeof(KV);  // of a chunk
    constexpr int kLanes = Layout::kGroup;      // that share a row
    constexpr int kGroups = Layout::kChunks / kLanes;
    const Operand& operand = kValues ? params_.v : params_.k;
    const int64_t offset = min(max(place_.slot, 0), params_.slots_k - 1) * operand.batch_stride +
                           place_.row * operand.row_stride;
    const int row = lane_ / kLanes, chunk = lane_ % kLanes;
    const KV* const source = rows_of<const KV>(operand, 0, 0, head_kv_) + chunk * kElements;
    const int cols = (kValues ? params_.headdim_v : params_.headdim) - chunk * kElements;
#pragma unroll
    for (int pass = 0; pass < kBlockN; pass += 32 / kLanes) {
      const KV* const row_source =
          source + __shfl_sync(0xffffffff, offset, first_lane_ + row + pass);
      const uint32_t target = slot + Layout::offset(before_ + row + pass, chunk);
      const bool valid_row = key_ + row + pass < end_;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int col = group * kLanes * kElements;
        ptx::cp_async_16_zfill(target + group * Layout::kGroupBytes, row_source + col,
                               valid_row && col < cols);
      }
    }
  }

  // To the next block.
  __device__ void advance() {
    key_ += Config::kStepKeys;
    first_lane_ = (first_lane_ + kBlockN) % 32;
    if (first_lane_ > 0 || is_behind()) return;
    place_ = next_place_;
    next_place_ = find(32);
  }

  const ForwardParams& params_;
  const int* const table_;  // (pages of a sequence), or null: not paged
  const int k_batch_, k_first_, head_kv_, page_shift_, end_, lane_;
  const int before_;              // keys of other warps in a tile that is shared
  int key_;                       // first key of the block
  int first_lane_ = 0;            // that knows the place of the block's first row
  Place place_{}, next_place_{};  // of one of 32 rows, and of the 32 rows behind them
};

}  // namespace flash::decode
