// Which tile a thread block takes next, and how its warps learn of it.
//
// Thread blocks stay on their SM. They draw numbers from one counter, so whoever is done first goes
// on. Numbers are given to the tiles so that long ones come first, and so that those that run
// together find K and V in the L2 cache. One warp draws and sends the tile to the others.
//
// A mixed batch has sequences of one block of queries, which are bound by memory (decoding), and
// others of several, which are bound by tensor cores (prefill). Each kind has a counter. Half of
// the workers begin with either, so that both run at the same time. Who finds none left helps with
// the other.
#pragma once

#include <cuda_runtime_api.h>

#include <climits>

#include "ptx/griddepcontrol.h"
#include "sm90/dense_tiles.h"
#include "sm90/pipeline.cuh"

namespace flash::sm90 {

constexpr int kTileSlots = 4;  // of tiles that are under way

// Held by one warp; `ticket` is the same in all of its lanes. Blocks tells of the sequences:
//   bool packed() const                 their numbers of blocks differ
//   int batch() const                   how many there are, if packed
//   int of_sequence(int batch) const    blocks of one, if packed
//   bool mixed() const                  those of one block have a counter of their own, if packed
//   bool together() const               they are at most 32, and take turns, if packed
//   bool all_drawn() const              all tickets are drawn: each worker begins with begin()
//   int run() const                     so many tickets, neighbours, are drawn at a time
//   int missing(const Tile&) const      tickets from this one on, in its run, that have no tile
template <typename Blocks>
class TileScheduler {
 public:
  // counters: (2), zero before and after the launch
  // worker: the number of this one among all `workers`
  __device__ TileScheduler(int* counters, const TileSchedule& schedule, Blocks blocks, int worker,
                           int workers, int lane)
      : counters_(counters),
        schedule_(schedule),
        blocks_(blocks),
        workers_(workers),
        lane_(lane),
        ticket_(last_of_run(worker)) {
    if (!blocks_.mixed()) return;
    singles_ = worker >= workers / 2;
    if (singles_) ticket_ -= workers / 2;
  }

  // Before the first tile; no kernel that still runs may have tickets.
  __device__ void begin() {
    if (blocks_.all_drawn()) draw();
  }

  // Draws the next ticket.
  __device__ void next() {
    ptx::wait_for_earlier_kernels();
    draw();
  }

  // Instead of next(), for the whole launch: every worker takes each `workers`th ticket. A next
  // tile, which a worker begins when this one has ended, is then at least so many tickets away.
  __device__ void next_undrawn() { ticket_ += workers_; }

  // Instead of next(): the next ticket of a run, whose last comes first.
  __device__ void next_of_run() { --ticket_; }

  // Instead of next(): no tile is left.
  __device__ void finish() { ticket_ = INT_MAX; }

  // The tile of the ticket. Each tile draws one ticket; who holds the last resets the counter.
  __device__ Tile tile() {
    for (;;) {
      const Tile tile = !blocks_.packed()    ? drawn_dense_tile()
                        : blocks_.together() ? tile_of_all()
                                             : packed_tile();
      if (tile.batch >= 0) return tile;
      // Of each counter every worker holds one ticket without a tile, in the end.
      if (ticket_ == last_of_run(workers_ - 1) + tiles_ && lane_ == 0) counters_[singles_] = 0;
      if (!blocks_.mixed() || helps_) return tile;
      helps_ = true;
      singles_ = !singles_;
      first_batch_ = tiles_ = 0;
      next();
    }
  }

 private:
  __device__ void draw() {
    int drawn = 0;
    if (lane_ == 0) drawn = ::atomicAdd(counters_ + singles_, 1);
    ticket_ = last_of_run(beginners() + __shfl_sync(0xffffffff, drawn, 0));
  }

  __device__ int last_of_run(int number) const { return (number + 1) * blocks_.run() - 1; }

  // Workers whose first ticket was not drawn from the counter.
  __device__ int beginners() const {
    if (!blocks_.mixed()) return blocks_.all_drawn() ? 0 : workers_;
    return singles_ ? workers_ - workers_ / 2 : workers_ / 2;
  }

  __device__ Tile drawn_dense_tile() {
    tiles_ = schedule_.tickets;
    if (ticket_ >= tiles_) return {0, 0, 0, -1};
    Tile tile = tile_of_ticket(schedule_, ticket_);
    const int missing = blocks_.missing(tile);
    ticket_ -= missing;
    tile.block += missing;
    return tile;
  }

  // Of a packed sequence: those that the counter is of.
  __device__ int blocks_of(int batch) const {
    const int blocks = batch < blocks_.batch() ? blocks_.of_sequence(batch) : 0;
    return blocks_.mixed() && (blocks == 1) != singles_ ? 0 : blocks;
  }

  // All sequences together, the last blocks first: long tiles do not begin late.
  __device__ Tile tile_of_all() {
    const int blocks = blocks_of(lane_), heads = schedule_.heads;
    const auto tiles_from = [=](int block) {
      return heads * __reduce_add_sync(0xffffffff, max(blocks - block, 0));
    };
    tiles_ = tiles_from(0);
    if (ticket_ >= tiles_) return {0, 0, 0, -1};
    int block = 0, end = __reduce_max_sync(0xffffffff, blocks);
    while (end - block > 1) {
      const int middle = (block + end) / 2;
      (tiles_from(middle) > ticket_ ? block : end) = middle;
    }
    const int rest = ticket_ - tiles_from(block + 1);
    const int turn = schedule_.of_heads.quotient(rest), head = rest - turn * heads;
    const unsigned have_block = __ballot_sync(0xffffffff, blocks > block);
    const bool found = blocks > block && __popc(have_block & ((1u << lane_) - 1)) == turn;
    const int batch = __ffs(__ballot_sync(0xffffffff, found)) - 1;
    return {block, head, schedule_.of_heads_of_kv.quotient(head), batch, 0, 1};
  }

  // Sequences one after the other. Tickets of one thread block only grow, so the search goes on
  // from the 32 sequences of the last.
  __device__ Tile packed_tile() {
    for (;;) {
      int blocks = blocks_of(first_batch_ + lane_);
      const int heads = schedule_.heads, splits = schedule_.splits;
      const int tiles = blocks * heads * splits;
      int end = tiles;  // of this lane's sequence, among those of the warp
#pragma unroll
      for (int delta = 1; delta < 32; delta *= 2) {
        const int before = __shfl_up_sync(0xffffffff, end, delta);
        if (lane_ >= delta) end += before;
      }
      const int rest = ticket_ - tiles_;
      const unsigned later = __ballot_sync(0xffffffff, end > rest);
      if (later != 0) {
        const int found = __ffs(later) - 1;
        const int within = rest - __shfl_sync(0xffffffff, end - tiles, found);
        blocks = __shfl_sync(0xffffffff, blocks, found);
        const int tile = schedule_.of_splits.quotient(within);
        const int row = schedule_.of_heads.quotient(tile), head = tile - row * heads;
        const int block = blocks - 1 - row;
        const int batch = first_batch_ + found;
        return {block,
                head,
                schedule_.of_heads_of_kv.quotient(head),
                batch,
                within - tile * splits,
                splits,
                (batch * heads + head) * schedule_.blocks + block};
      }
      if (first_batch_ >= blocks_.batch()) return {0, 0, 0, -1};
      tiles_ += __shfl_sync(0xffffffff, end, 31);
      first_batch_ += 32;
    }
  }

  int* const counters_;
  const TileSchedule& schedule_;
  const Blocks blocks_;
  const int workers_, lane_;
  int ticket_;
  bool singles_ = false;  // if mixed: tickets are of sequences of one block, or of the others
  bool helps_ = false;    // if mixed: no tile is left of the kind that this worker began with
  int first_batch_ = 0;   // of packed sequences, the first of those searched
  int tiles_ = 0;         // before them; in the end of all sequences
};

// Tiles on their way from the warp that draws them to those that work on them, in shared memory.
// Sent: a Tile, and what is known of it
template <typename Sent>
struct TilePipeline : Pipeline<kTileSlots> {
  using State = PipelineState<kTileSlots>;
  Sent slots[kTileSlots];

  // Each side has its own `state`, which advances.
  __device__ void send(const Tile& tile, State& state, int lane) {
    send(state, lane, [&](Sent& slot) { slot = tile; });
  }
  // write(slot), by one lane
  template <typename Write>
  __device__ void send(State& state, int lane, Write write) {
    this->wait_empty(state);
    if (lane == 0) write(slots[state.stage()]);
    arrive_of_warp(this->full[state.stage()], lane);
    state.advance();
  }
  // The last one, to the warp that has sent it.
  __device__ const Sent& sent(State state) const { return slots[(state.count - 1) % kTileSlots]; }
  // What `look` returns is there until it is released.
  __device__ const Sent& look(State state) {
    this->wait_full(state);
    return slots[state.stage()];
  }
  __device__ Sent receive(State& state, int lane) {
    const Sent tile = look(state);
    this->release(state, lane);
    state.advance();
    return tile;
  }
};

}  // namespace flash::sm90
