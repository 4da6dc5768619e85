// Where the rows of a sequence lie in a cache of pages. What comes from the device is clamped into
// the tensors that it indexes.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "params.h"

namespace flash {

struct PagedRows {
  const int* pages;   // (rows / page_size): the sequence's row of the block table
  Divisor page_size;  // rows of a page
  int rows;           // what a row of the table holds
  int page_count;     // of the cache

  // Of a ForwardParams or WidenParams.
  template <typename Params>
  __device__ PagedRows(const Params& params, const Divisor& page_size, int batch)
      : pages(params.block_table + batch * params.block_table_stride),
        page_size(page_size),
        rows(params.seqlen_k),
        page_count(params.slots_k) {}

  // Elements from the first of K's or V's head to those of the sequence's row `any_row`, which
  // counts a left pad as well (Sequence::k_first). Past the end of the table it is that of the last
  // row: what lies outside of the sequence is not for the caller to use.
  __device__ int64_t offset(const Operand& operand, unsigned any_row) const {
    const int row = min(any_row, rows - 1u);
    const int place = page_size.quotient(row);
    const int page = min(max(pages[place], 0), page_count - 1);
    return page * operand.batch_stride + (row - place * page_size.value) * operand.row_stride;
  }
};

}  // namespace flash
