// The blocks of keys of a tile, in the order in which its producers and consumers take them.
//
// A type for another order, like the list of a block-sparse mask, has the same members.
#pragma once

namespace flash::sm90 {

// From the last block to the first. With kFromDiagonal it may start at any block: what is behind
// comes in the end, again from the last on.
template <int kBlockN, bool kFromDiagonal>
class KeyBlocks {
 public:
  // Of the keys begin .. end - 1, one of several equal parts.
  __device__ KeyBlocks(int begin, int end, int part, int parts)
      : first_(begin / kBlockN * kBlockN) {
    const int blocks = begin < end ? (end - 1) / kBlockN - begin / kBlockN + 1 : 0;
    last_ = first_ + (blocks - 1) * kBlockN;
    if (parts > 1) {
      last_ = first_ + (blocks * (part + 1) / parts - 1) * kBlockN;
      first_ += blocks * part / parts * kBlockN;
    }
    start_ = key_ = last_;
    end_ = first_;
  }

  // Before the first step: starts at the block of `key`, or at the nearest.
  __device__ void start_at(int key) {
    start_ = key_ = min(max(first_, key / kBlockN * kBlockN), last_);
    if (start_ < last_) end_ = start_ + kBlockN;
  }

  __device__ bool empty() const { return first_ > last_; }
  __device__ int key() const { return key_; }  // the block's first
  __device__ bool is_first() const { return key_ == start_; }
  __device__ bool is_last() const { return key_ == end_; }
  __device__ void advance() { key_ = kFromDiagonal && key_ == first_ ? last_ : key_ - kBlockN; }

  // Calls function(block) for each, from this one on.
  template <typename Function>
  __device__ void for_each(Function function) const {
    if (empty()) return;
#pragma unroll 1
    for (KeyBlocks block = *this;; block.advance()) {
      function(block);
      if (block.is_last()) return;
    }
  }

 private:
  int first_, last_;  // in memory: the first keys of their blocks
  int start_, end_;   // in time
  int key_;
};

}  // namespace flash::sm90
