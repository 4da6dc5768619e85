// How a warp of the decode kernel brings its keys and values to shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/sequence.h"
#include "params.h"
#include "ptx/cp_async.h"

namespace flash::decode {

// A warp's blocks of kBlockN keys of one head of a sequence: from key `first` on one in `stride`
// keys, as far as they begin before `end`. Blocks are loaded in order, of each first the keys and
// then the values. Rows from `end` on become zero and are not read. Of a warpgroup, whose warps
// share keys, each warp loads as many blocks.
//
// Without pages each lane goes on from address to address. With pages it knows the place of one of
// 32 rows, and gives it to the lanes that copy the row. So pages may have any size, and what the
// block table says is asked for 32 rows in advance.
template <typename Config>
class KeyLoader {
  using KV = typename Config::KV;
  static constexpr int kBlockN = Config::kBlockN;
  static_assert(32 % kBlockN == 0);
  template <bool kValues>
  using Layout =
      std::conditional_t<kValues, typename Config::ValueLayout, typename Config::KeyLayout>;
  static constexpr int kChunk = 16 / sizeof(KV);  // elements

 public:
  // page_shift: log2 of the page size, or -1
  __device__ KeyLoader(const ForwardParams& params, int batch, int head_kv, int page_shift,
                       int stride, int lane)
      : params_(params),
        table_(params.block_table == nullptr
                   ? nullptr
                   : params.block_table + batch * params.block_table_stride),
        head_kv_(head_kv),
        page_shift_(page_shift),
        stride_(stride),
        lane_(lane),
        before_(Config::kWarpgroup ? threadIdx.x / 32 * kBlockN : 0) {}

  // first: of the warp's first block
  __device__ void start(const Sequence& sequence, int first, int end) {
    k_batch_ = sequence.k_batch;
    k_first_ = sequence.k_first;
    key_ = first;
    end_ = end;
    if (table_ == nullptr) {
      keys_ = first_row<false>();
      values_ = first_row<true>();
    } else if (!is_behind()) {
      place_ = find(0);
      next_place_ = find(32);
    }
  }

  // Moves the end forward. Rows from there on that are under way keep what is in memory:
  // clear_tail.
  __device__ void end_at(int end) { end_ = end; }

  // Zeros in rows of a block from the end on, by the lanes that have copied them.
  // slot: of the values of the block that begins at key `first`
  __device__ void clear_tail(unsigned char* slot, int first) const {
    using Tile = Layout<true>;
    const int row = lane_ / Tile::kGroup, chunk = lane_ % Tile::kGroup;
    for (int pass = 0; pass < kBlockN; pass += 32 / Tile::kGroup) {
      if (first + row + pass < end_) continue;
      for (int group = 0; group < Tile::kChunks / Tile::kGroup; ++group) {
        *reinterpret_cast<uint4*>(slot + Tile::offset(before_ + row + pass, chunk) +
                                  group * Tile::kGroupBytes) = make_uint4(0, 0, 0, 0);
      }
    }
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
  // A row of a page, as the block table says: not clamped yet.
  struct Place {
    int page, row;
  };

  // Whether no block is left.
  __device__ bool is_behind() const { return key_ - before_ >= end_; }

  // Where the lane's chunks of the next block begin, without pages.
  template <bool kValues>
  __device__ const KV* first_row() const {
    constexpr int kLanes = Layout<kValues>::kGroup;
    return rows_of<const KV>(kValues ? params_.v : params_.k, k_batch_,
                             k_first_ + key_ + lane_ / kLanes, head_kv_) +
           lane_ % kLanes * kChunk;
  }

  // Of the row that is `ahead` and the lane behind the warp's next.
  __device__ Place find(int ahead) const {
    const int i = ahead + lane_;
    const int key = key_ + i / kBlockN * stride_ + i % kBlockN;
    const int row = k_first_ + min(key, end_ - 1);
    const int page = page_shift_ >= 0 ? row >> page_shift_ : row / params_.page_size;
    return {table_[page], row - page * params_.page_size};
  }

  template <bool kValues>
  __device__ void copy(uint32_t slot) const {
    using Tile = Layout<kValues>;
    constexpr int kLanes = Tile::kGroup;  // that share a row
    constexpr int kRows = 32 / kLanes;    // of a pass
    const Operand& operand = kValues ? params_.v : params_.k;
    const int row = lane_ / kLanes, chunk = lane_ % kLanes;
    const int cols = (kValues ? params_.headdim_v : params_.headdim) - chunk * kChunk;
    // row_source: of the lane's first chunk
    const auto copy_row = [&](int pass, const KV* row_source) {
      const uint32_t target = slot + Tile::offset(before_ + row + pass, chunk);
      const bool valid_row = key_ + row + pass < end_;
#pragma unroll
      for (int group = 0; group < Tile::kChunks / kLanes; ++group) {
        const int col = group * kLanes * kChunk;
        ptx::cp_async_16_zfill(target + group * Tile::kGroupBytes, row_source + col,
                               valid_row && col < cols);
      }
    };
    if (table_ == nullptr) {
      const KV* source = kValues ? values_ : keys_;
#pragma unroll
      for (int pass = 0; pass < kBlockN; pass += kRows) {
        copy_row(pass, source);
        source += kRows * operand.row_stride;
      }
      return;
    }
    const int64_t offset = min(max(place_.page, 0), params_.slots_k - 1) * operand.batch_stride +
                           place_.row * operand.row_stride;
    const KV* const source = rows_of<const KV>(operand, 0, 0, head_kv_) + chunk * kChunk;
#pragma unroll
    for (int pass = 0; pass < kBlockN; pass += kRows) {
      copy_row(pass, source + __shfl_sync(0xffffffff, offset, first_lane_ + row + pass));
    }
  }

  // To the next block.
  __device__ void advance() {
    key_ += stride_;
    if (table_ == nullptr) {
      keys_ += stride_ * params_.k.row_stride;
      values_ += stride_ * params_.v.row_stride;
      return;
    }
    first_lane_ = (first_lane_ + kBlockN) % 32;
    if (first_lane_ > 0 || is_behind()) return;
    place_ = next_place_;
    next_place_ = find(32);
  }

  const ForwardParams& params_;
  const int* const table_;  // (pages of a sequence), or null: not paged
  const int head_kv_, page_shift_, stride_, lane_;
  const int before_;  // keys of other warps in a tile that is shared
  int k_batch_, k_first_, end_;
  const KV *keys_, *values_;      // without pages: of the lane, in the next block
  int key_;                       // first key of the block
  int first_lane_ = 0;            // that knows the place of the block's first row
  Place place_{}, next_place_{};  // of one of 32 rows, and of the 32 rows behind them
};

}  // namespace flash::decode
