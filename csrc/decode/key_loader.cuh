// How a warp of the decode kernel brings its keys and values to shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/divisor.h"
#include "common/sequence.h"
#include "common/shared_address.h"
#include "params.h"
#include "ptx/cp_async.h"

namespace flash::decode {

// A warp's blocks of kBlockN keys of one head of a sequence: from key `first` on one in `stride`
// keys, as far as they begin before `end`. Blocks are loaded in order, of each first the keys and
// then the values. Rows from `end` on become zero and are not read. Of a warpgroup, whose warps
// share keys, each warp loads as many blocks.
//
// Each lane knows the place of one of 32 rows, and gives it to the lanes that copy the row. So
// pages may have any size. What the block table says is copied to shared memory with the keys of a
// block as far before as the ring is long: whoever loads the rows has waited for those keys.
template <typename Config>
class KeyLoader {
  using KV = typename Config::KV;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kSpans = Config::kSpans;
  static_assert(32 % kBlockN == 0);
  template <bool kValues>
  using Layout =
      std::conditional_t<kValues, typename Config::ValueLayout, typename Config::KeyLayout>;
  static constexpr int kChunk = 16 / sizeof(KV);  // elements

 public:
  // pages: room of the warp for what the block table says
  __device__ KeyLoader(const ForwardParams& params, int batch, int head_kv,
                       const Divisor& page_size, int stride, int lane, int (*pages)[32])
      : params_(params),
        table_(params.block_table == nullptr
                   ? nullptr
                   : params.block_table + batch * params.block_table_stride),
        page_size_(page_size),
        head_kv_(head_kv),
        stride_(stride),
        lane_(lane),
        pages_(pages),
        before_(Config::kWarpgroup ? threadIdx.x / 32 * kBlockN : 0) {}

  // first: of the warp's first block
  __device__ void start(const Sequence& sequence, int first, int end) {
    k_batch_ = sequence.k_batch;
    k_first_ = sequence.k_first;
    key_ = first;
    end_ = end;
    if (is_behind()) return;
    if (table_ == nullptr) return go_to(k_batch_, row_at(0));
    int pages[kSpans + 1];
#pragma unroll
    for (int i = 0; i <= kSpans; ++i) pages[i] = *entry_at(i * 32);
#pragma unroll
    for (int i = 0; i < kSpans; ++i) pages_[i][lane_] = pages[i + 1];
    go_to_page(pages[0]);
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
  // Whether no block is left.
  __device__ bool is_behind() const { return key_ - before_ >= end_; }

  // The row that is `ahead` and the lane behind the warp's next, among all pages of the sequence.
  __device__ int row_at(int ahead) const {
    const int i = ahead + lane_;
    return k_first_ + min(key_ + i / kBlockN * stride_ + i % kBlockN, end_ - 1);
  }
  // What the block table says of it.
  __device__ const int* entry_at(int ahead) const {
    return table_ + page_size_.quotient(row_at(ahead));
  }

  // The lane's row: of a batch entry or of a page.
  __device__ void go_to(int slot, int row) {
    key_row_ = slot * params_.k.batch_stride + row * params_.k.row_stride;
    value_row_ = slot * params_.v.batch_stride + row * params_.v.row_stride;
  }
  // Of a page, as the block table says.
  __device__ void go_to_page(int page) {
    const int row = row_at(0);
    go_to(min(max(page, 0), params_.slots_k - 1),
          row - page_size_.quotient(row) * page_size_.value);
  }

  template <bool kValues>
  __device__ void copy(uint32_t slot) const {
    using Tile = Layout<kValues>;
    constexpr int kLanes = Tile::kGroup;  // that share a row
    constexpr int kRows = 32 / kLanes;    // of a pass
    const Operand& operand = kValues ? params_.v : params_.k;
    const int row = lane_ / kLanes, chunk = lane_ % kLanes;
    const int cols = (kValues ? params_.headdim_v : params_.headdim) - chunk * kChunk;
    const KV* const source = rows_of<const KV>(operand, 0, 0, head_kv_) + chunk * kChunk;
#pragma unroll
    for (int pass = 0; pass < kBlockN; pass += kRows) {
      const KV* const row_source = source + __shfl_sync(0xffffffff, kValues ? value_row_ : key_row_,
                                                        first_lane_ + row + pass);
      const uint32_t target = slot + Tile::offset(before_ + row + pass, chunk);
      const bool valid_row = key_ + row + pass < end_;
#pragma unroll
      for (int group = 0; group < Tile::kChunks / kLanes; ++group) {
        const int col = group * kLanes * kChunk;
        ptx::cp_async_16_zfill(target + group * Tile::kGroupBytes, row_source + col,
                               valid_row && col < cols);
      }
    }
  }

  // To the next block.
  __device__ void advance() {
    key_ += stride_;
    first_lane_ = (first_lane_ + kBlockN) % 32;
    if (first_lane_ > 0 || is_behind()) return;
    if (table_ == nullptr) return go_to(k_batch_, row_at(0));
    constexpr int kBlocks = kSpans * 32 / kBlockN;  // since this was asked
    ptx::cp_async_wait<2 * kBlocks - 1>();
    int& page = pages_[span_][lane_];
    go_to_page(page);
    ptx::cp_async_4_zfill(shared_address(&page), entry_at(kSpans * 32), true);
    span_ = span_ + 1 == kSpans ? 0 : span_ + 1;
  }

  const ForwardParams& params_;
  const int* const table_;  // (pages of a sequence), or null: not paged
  const Divisor& page_size_;
  const int head_kv_, stride_, lane_;
  int (*const pages_)[32];  // of kSpans times 32 rows, as the block table says
  const int before_;        // keys of other warps in a tile that is shared
  int k_batch_, k_first_, end_;
  int key_;                              // first key of the next block
  int first_lane_ = 0;                   // that knows the place of the block's first row
  int64_t key_row_ = 0, value_row_ = 0;  // offsets of the lane's one of 32 rows
  int span_ = 0;                         // of pages_, of the 32 rows behind them
};

}  // namespace flash::decode
