// Ranges of rows or blocks, and the walk of a kernel's main loop over them.
#pragma once

namespace flash {

// begin .. end - 1; empty if begin >= end.
struct Range {
  int begin, end;

  __device__ bool empty() const { return begin >= end; }
};

// The places that a main loop goes to, one after the other: here each kStep-th of a range, up from
// its begin or, with a kStep below 0, down from end + kStep. For other sets of blocks, a list for
// example, there would be another type with these members.
template <int kStep>
class Walk {
 public:
  __device__ explicit Walk(Range range)
      : range_(range), place_(kStep > 0 ? range.begin : range.end + kStep) {}

  // Whether there is a place: the walk has not ended.
  __device__ bool valid() const { return kStep > 0 ? place_ < range_.end : place_ >= range_.begin; }
  __device__ void advance() { place_ = next(); }

  __device__ int place() const { return place_; }
  __device__ int next() const { return place_ + kStep; }
  __device__ int previous() const { return place_ - kStep; }
  __device__ bool has_next() const {
    return kStep > 0 ? place_ + kStep < range_.end : place_ > range_.begin;
  }
  __device__ bool has_previous() const {
    return kStep > 0 ? place_ > range_.begin : place_ - kStep < range_.end;
  }

 private:
  const Range range_;
  int place_;
};

}  // namespace flash
