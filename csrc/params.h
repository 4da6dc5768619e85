// Plain structs that the host fills and the kernels read. No torch, no CUDA types.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

namespace flash {

// kOther is any dtype that no kernel takes.
enum class DType : uint8_t {
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kInt8,
  kFloat32,
  kInt32,
  kInt64,
  kOther
};

// What a kernel is compiled for. kFull has softcap, ALiBi and dropout, the latter two also of a
// part of a larger problem; on sm80 also tensors that cannot be moved 16 bytes at a time. kPlain
// has none of them.
enum class FeatureSet : uint8_t { kPlain, kFull };

// What a call may ask for beyond dense sequences of tensors that can be moved 16 bytes at a time.
enum Feature : uint32_t {
  kSoftcap = 1 << 0,
  kAlibi = 1 << 1,
  kDropout = 1 << 2,
  kAnyAlignment = 1 << 3,
  kPages = 1 << 4,
  kCacheSlots = 1 << 5,
  kPlace = 1 << 6,
};

// Its name, and the argument that asks for it: a tensor that is given, or a number that is not 0.
struct FeatureName {
  Feature feature;
  const char* name;
  const char* argument;
};
constexpr FeatureName kFeatureNames[] = {
    {kSoftcap, "softcap", "softcap"},   {kAlibi, "alibi", "alibi_slopes"},
    {kDropout, "dropout", "rng_state"}, {kAnyAlignment, "any_alignment", ""},
    {kPages, "pages", "block_table"},   {kCacheSlots, "cache_slots", "cache_batch_idx"},
    {kPlace, "place", "place_nheads"},
};

// What the kernels of a feature set take of these, whatever the architecture.
constexpr uint32_t features_of(FeatureSet set) {
  return set == FeatureSet::kFull ? kSoftcap | kAlibi | kDropout | kPlace : 0;
}

// Element (b, i, h, d) of a tensor (batch, rows, heads, dim) lies at data + b * batch_stride +
// i * row_stride + h * head_stride + d. A packed tensor (rows, heads, dim) has batch_stride 0.
struct Operand {
  void* data;
  int64_t batch_stride, row_stride, head_stride;
};

// What the elements of a cache in e4m3 (FP8) are multiplied by: for head h of sequence b data[b *
// batch_stride + h * head_stride], which is positive. Null: 1.
struct Descale {
  const float* data;
  int64_t batch_stride, head_stride;
};

// What the parameters of all operations are, to those who launch any.
struct CallParams {};

// Which random numbers drop an entry of P. A draw is two words, x and y, and has a byte for each of
// eight entries. An entry's number has 39 bits: the complement of its byte's lower seven, and the
// 32 of y * 0x9E3779B9 + x, which the eight share. Those below the threshold, 2^39 dropout_p, drop.
// So the lower seven bits and a byte of `added` reach 128.
struct DropoutThreshold {
  uint32_t shared;  // the lower 32 bits
  // Four copies of the upper seven bits, and the same plus 1 each for what is shared below that.
  uint32_t added[2];

  static DropoutThreshold of(double dropout_p) {
    const auto bits = static_cast<uint64_t>(std::llrint(dropout_p * 0x1p39));
    const uint32_t own = static_cast<uint32_t>(bits >> 32) * 0x01010101u;
    return {static_cast<uint32_t>(bits), {own, own + 0x01010101u}};
  }
};

// What forward and backward share.
struct AttentionParams : CallParams {
  Operand q;  // (batch, seqlen_q, nheads, headdim) or (total_q, nheads, headdim)
  Operand k;  // (slots_k, seqlen_k, nheads_kv, headdim) or (total_k, nheads_kv, headdim)
  Operand v;  // the same with headdim_v

  // Row i of head h of sequence b: data + b * lse_batch_stride + h * lse_head_stride + i, for the
  // packed layout with the first row of sequence b added to i.
  float* lse;  // (batch, nheads, seqlen_q) or (nheads, total_q), contiguous, natural log
  int64_t lse_batch_stride, lse_head_stride;

  int batch, nheads, nheads_kv;
  int seqlen_q, seqlen_k;  // of a dense sequence, or the longest of the packed ones
  int headdim, headdim_v;  // at most what the kernel is compiled for
  int total_q, total_k;    // rows of packed tensors
  int slots_k;             // rows of a dense K's batch dimension
  bool aligned;            // all operands can be moved 16 bytes at a time

  const int* cu_seqlens_q;     // (batch + 1), or null: dense
  const int* cu_seqlens_k;     // (batch + 1), or null: dense
  const int* seqused_k;        // (batch), or null
  const int* leftpad_k;        // (batch), or null
  const int* cache_batch_idx;  // (batch), or null

  float softmax_scale;

  // Key j is visible to query i iff i + shift - window_left <= j <= i + shift + window_right, with
  // shift = seqlen_k - seqlen_q. -1 means unbounded; causal is window_right = 0.
  int window_left, window_right;

  float softcap;               // 0: off
  const float* alibi_slopes;   // (nheads) or (batch, nheads), or null
  int64_t alibi_batch_stride;  // 0 or nheads

  const int64_t* rng_state;  // (2): seed, offset; null: no dropout
  DropoutThreshold dropout_threshold;
  float dropout_scale;  // of what is kept: 1 / (1 - dropout_p); 1 without dropout

  // Where the problem lies in a larger one, whose ALiBi and dropout mask it has: the heads of that
  // one (0: there is none), and the first sequence, head, query and key. With dropout, the latter
  // two are multiples of 16. To ALiBi, a query stands place_shift keys later than to masks.
  int place_nheads, place_batch, place_head, place_row, place_column, place_shift;

  bool deterministic;  // two runs give the same bits

  // Bytes that a thread block may use: tiles are chosen by it.
  int shared_memory;
  int tile;  // which of the kernel's tile shapes, counted from 0; -1: the kernel chooses
};

// The parameters that are numbers as they are given: visit(name, field).
template <typename Visit>
void visit_numbers(AttentionParams& params, Visit visit) {
  visit("softmax_scale", params.softmax_scale);
  visit("window_left", params.window_left);
  visit("window_right", params.window_right);
  visit("softcap", params.softcap);
  visit("deterministic", params.deterministic);
  visit("shared_memory", params.shared_memory);
  visit("tile", params.tile);
  visit("place_nheads", params.place_nheads);
  visit("place_batch", params.place_batch);
  visit("place_head", params.place_head);
  visit("place_row", params.place_row);
  visit("place_column", params.place_column);
  visit("place_shift", params.place_shift);
}

// Of the operations "forward" and "decode".
struct ForwardParams : AttentionParams {
  static constexpr std::string_view kOperation = "forward";

  Operand out;         // (batch, seqlen_q, nheads, headdim_v) or (total_q, nheads, headdim_v)
  const float* s_aux;  // (nheads): the logit of each head's attention sink, or null
  Descale k_descale, v_descale;

  // Paged K and V, (pages, page_size, nheads_kv, dim): row i of sequence b is row i % page_size of
  // page block_table[b * block_table_stride + i / page_size]. seqlen_k is what a row of the table
  // holds, slots_k the number of pages. Null: not paged.
  const int* block_table;
  int64_t block_table_stride;
  int page_size;
  // Of pages: rows in use as the differences of cu_seqlens_k, behind leftpad_k longest_k at most.
  const int* lengths_k;  // (batch + 1), or null
  int longest_k;

  // Parts into which the keys of a tile are divided, each for another thread block; 0: the kernel
  // chooses.
  int num_splits;
  // Of the operation "decode": what the parts leave for the last of them, which merges them,
  // outputs and rows' statistics.
  float *partial_out, *partial_rows;
  // (kKeptZero): in a forward the first hands out tiles, the second those of decoding in a mixed
  // batch; in "decode" they count the parts of a tile that are done.
  int* counters;

  // Of the operation "decode", where the stream's kernel before it appends to the cache: how many
  // rows, and what seqused_k was before. Null: there is none.
  const int* seqused_before;  // (batch)
  int seqlen_new;
};

template <typename Visit>
void visit_numbers(ForwardParams& params, Visit visit) {
  visit_numbers(static_cast<AttentionParams&>(params), visit);
  visit("num_splits", params.num_splits);
  visit("seqlen_new", params.seqlen_new);
}

// Keys that share a scale, where keys and values are quantised.
constexpr int kScaledKeys = 128;

// What the elements of keys or values in 8 bits are multiplied by, all positive: entry i of head h
// of sequence b, of its i-th kScaledKeys keys, is data[b * batch_stride + h * head_stride + i]. Of
// packed sequences all are counted on, and batch_stride is 0. Null: 1.
struct Scales {
  float* data;
  int64_t batch_stride, head_stride;
};

// Of the operation "quantised": a forward that multiplies q and k in 8 bits, of one type. Where k
// has scales, q comes in the 16 bits of the result, with headdim_q columns, and is rotated and
// rounded inside; k has the head dimension of the kernel. v is in e4m3 or, where k is of int8 and v
// has no scales, of the 16 bits of the result. Sequence i of packed
// keys has its blocks of kScaledKeys keys from block cu_seqlens_k[i] / kScaledKeys + i on, a dense
// one from block 0 on.
struct QuantisedParams : ForwardParams {
  static constexpr std::string_view kOperation = "quantised";

  // v in e4m3 is transposed, (batch, nheads_kv, headdim_v, places_v) or (nheads_kv, headdim_v,
  // places_v): row_stride is that of the head dimension. Keys have their places by
  // sm90/scaled_blocks.cuh. Behind the last key of a sequence, to the end of its last block, there
  // are zeros. Without scales it comes as it is, like k: raw_v. Then v is a workspace.
  Operand raw_v;
  int places_v;

  int headdim_q;

  Scales k_scale, v_scale;
  Descale q_descale;  // as k_descale and v_descale; all may have any sign
  float score_scale;  // softmax_scale, which is 1 in a kernel: scores have their scales then
};

// The rotary embedding: of a token at position p, channel pair i is turned by the angle whose
// cosine and sine stand in row p, column i. It has channels (i, i + pairs), or (2i, 2i + 1) if they
// are interleaved; channels behind the pairs stay as they are.
struct Rotation {
  const void *cos, *sin;  // (positions, pairs), contiguous; null: nothing is rotated
  int positions, pairs;
  bool float_tables;  // they are float32; else of the dtype of the tokens
  bool interleaved;
  bool conjugate;  // by the negative angle
};

// Of the operation "quantise": k and v of 16 bits become what QuantisedParams has. v null: it stays
// as it is. q comes with a rotary embedding alone, and keeps its 16 bits.
struct QuantiseParams : CallParams {
  static constexpr std::string_view kOperation = "quantise";

  Operand q;      // (batch, seqlen_q, nheads, headdim)
  Operand k;      // (batch, seqlen_k, nheads_kv, headdim) or (total_k, nheads_kv, headdim)
  Operand v;      // the same with headdim_v
  Operand q_out;  // like q
  Operand k_out;  // like k with the kernel's head dimension
  Operand v_out;  // as v of QuantisedParams
  Scales k_scale, v_scale;
  int batch_q, seqlen_q;  // 0 without q
  int batch, seqlen_k;    // seqlen_k: of a dense sequence
  int nheads, nheads_kv, headdim, headdim_v;
  int total_k;                  // rows of packed k
  int blocks;                   // of kScaledKeys keys: of a dense sequence, or of all packed ones
  int tiles_v, tiles_k, tiles;  // of kScaledKeys rows of a head: of v, of k, of all; by prepare()
  const int* cu_seqlens_k;      // (batch + 1), or null: dense
  const int* seqused_k;         // (batch), or null; where a forward has its values transposed
  Rotation rotation;  // of q and k first; of dense sequences alone, row i is at position i
};

struct BackwardParams : AttentionParams {
  static constexpr std::string_view kOperation = "backward";

  Operand out;   // as in the forward
  Operand dout;  // like out
  Operand dq;    // like q
  Operand dk;    // like k
  Operand dv;    // like v
  float* dlse;   // like lse: the gradient that arrives through it; or null
  float* delta;  // like lse, written: rowsum(dout * out) - dlse

  // With dropout, dS is found without its factor dropout_scale, with delta divided by it.
  float gradient_scale;  // of dQ and dK: softmax_scale * dropout_scale
  float delta_scale;     // 1 / dropout_scale

  // dQ / gradient_scale, cleared by the kernels: (nheads, row_tiles, elements of a row tile). A row
  // tile is 16 queries (sm80) or those of a step (sm90), kept in the order of accumulators; those
  // of sequence b begin at dq_tile(b). Of whole heads (sm90/backward_tiles.cuh): (thread blocks,
  // row tiles of a head, elements of a row tile), not cleared.
  float* dq_accum;
  int row_tiles;
  // For each (head, row tile) one counter, or two where two thread blocks add half of the columns
  // each, cleared too: whose turn it is to add. Null: no order, the result may differ in its last
  // bits from run to run.
  int* dq_turn;
  // sm90: how far dQ is, see sm90/idle_warps.cuh; null: no idle warp works on it.
  int* dq_progress;
  // sm90: (nheads, row_tiles, 2, rows of a tile), see sm90/backward_rows.cuh.
  float* row_statistics;
  // What the parts of a tile leave of dK and dV. sm80: the last of them adds them up; sm90: another
  // kernel.
  float* partial_dkv;
  int* counters;  // (kKeptZero), as in the forward
};

struct RotaryParams : CallParams {
  static constexpr std::string_view kOperation = "rotary";

  Operand x;    // (batch, seqlen, nheads, headdim) or (total, nheads, headdim)
  Operand out;  // the same; may be x
  Rotation rotation;
  int batch, seqlen;  // seqlen: of packed tokens all
  int nheads, headdim;
  bool aligned;  // x and out can be moved 16 bytes at a time
  bool in_place;
  const int* cu_seqlens;  // (batch + 1), or null: dense
  const int* offsets;     // (batch): position of the first token of each sequence, or null: offset
  int offset;
};

// Entry (b, h, i) lies at data + b * batch_stride + h * head_stride + i.
template <typename T>
struct RowValues {
  T* data;
  int64_t batch_stride, head_stride;

#ifdef __CUDACC__
  __device__ T& at(int batch, int head, int row) const {
    return data[batch * batch_stride + head * head_stride + row];
  }
#endif
};

// Attention to some keys and to others becomes, in place of the first, that to all.
struct MergeParams : CallParams {
  static constexpr std::string_view kOperation = "merge";

  Operand out;   // (batch, seqlen, nheads, headdim)
  Operand part;  // the same
  RowValues<float> lse;
  RowValues<const float> part_lse;
  int batch, seqlen, nheads, headdim;
  bool aligned;  // out and part can be moved 16 bytes at a time
};

// An append lets the attention start early for at most so many sequences: the attention's thread
// blocks should find all SMs alike, unless all of this is short.
constexpr int kFewSequences = 4;

// New keys and values are written to a cache, and the queries rotated, before a forward.
struct AppendParams : CallParams {
  static constexpr std::string_view kOperation = "append";

  Operand q, rotated_q;  // (batch, seqlen_q, nheads, headdim); not rotated: the second is null
  Operand k_new, v_new;  // (batch, seqlen_new, nheads_kv, headdim), headdim_v of v_new
  Operand k, v;          // (slots_k, seqlen_k, nheads_kv, headdim) or (pages, page_size, ...)
  Descale k_descale, v_descale;
  Rotation rotation;
  int batch, seqlen_q, seqlen_new, nheads, nheads_kv, headdim, headdim_v;
  int seqlen_k;                // rows that a sequence has in the cache
  int slots_k;                 // of a dense cache; number of pages of a paged one
  bool aligned;                // all of them can be moved 16 bytes at a time
  bool masked;                 // each query has a position of its own; else all have the first
  const int* seqused_k;        // (batch): rows in use before; negative: nothing is appended
  int* lengths;                // (batch), written: rows in use afterwards
  const int* cache_batch_idx;  // as in AttentionParams
  const int* block_table;      // as in ForwardParams
  int64_t block_table_stride;
  int page_size;
};

// What a cache in e4m3 holds, times its descales, in 16 bits, before a forward of many queries.
struct WidenParams : CallParams {
  static constexpr std::string_view kOperation = "widen";

  Operand k, v;          // as in AppendParams
  Operand k_out, v_out;  // (batch, seqlen_k, nheads_kv, headdim), headdim_v of v_out
  Descale k_descale, v_descale;
  int batch, nheads_kv, headdim, headdim_v;
  int seqlen_k;                // rows of a sequence that are widened, at most
  int reach;                   // of a sequence's rows in use so many, at its end, can be seen
  int slots_k;                 // of a dense cache; number of pages of a paged one
  const int* seqused_k;        // (batch), or null
  const int* cache_batch_idx;  // as in AttentionParams
  const int* block_table;      // as in ForwardParams
  int64_t block_table_stride;
  int page_size;
};

}  // namespace flash
