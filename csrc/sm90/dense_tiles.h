// Which tiles there are, and the order in which those of dense sequences are handed out.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "common/divisor.h"

namespace flash::sm90 {

struct alignas(16) Tile {
  int block, head, head_kv, batch;  // batch -1: no tile is left
  int part, parts;
  int place;  // where it leaves its parts, if it is divided
};

// What the host decides about the tiles of a launch. A tile is a block of rows of one head. Its
// work may be divided among thread blocks, each of which takes a part. Of dense sequences the last
// tiles alone may be, which would leave many SMs without work; of packed ones, all or none. Where
// all are divided, each head counts as `splits` heads in a section.
struct TileSchedule {
  int splits;        // parts of a divided tile
  int heads;         // of tiles
  int heads_of_kv;   // of these that read the same keys
  int blocks;        // tiles of one head of a dense sequence
  int section;       // heads, over all batch entries, that run together and share the L2 cache
  int last_section;  // heads of the last one, whose short tiles keep all SMs busy to the end
  int tiles;         // in all, if sequences are dense
  int whole;         // of these, not divided
  int tickets;       // of whole tiles, and of parts if the same launch has them: see count_tickets

  // What follows from these, so that a kernel need not divide. See complete().
  int early_heads;  // in front of the last section
  Divisor of_splits, of_heads, of_heads_of_kv;
  Divisor of_section_tiles;  // tiles of a section
  // Heads of a section; short: of the one in front of the last.
  Divisor of_section, of_short_section, of_last_section;

  // Among those that read the same keys.
  __device__ int head_of_group(const Tile& tile) const {
    return tile.head - tile.head_kv * heads_of_kv;
  }
  __host__ __device__ int count_tickets() const {
    return whole + (splits == 1 ? 0 : (tiles - whole) * splits);
  }
  // By the host, when all else is known.
  void complete() {
    early_heads = tiles / std::max(blocks, 1) * (whole == 0 ? splits : 1) - last_section;
    const auto divisor = [](int64_t x) {
      return Divisor(static_cast<int>(std::clamp<int64_t>(x, 1, INT_MAX)));
    };
    of_splits = divisor(splits), of_heads = divisor(heads), of_heads_of_kv = divisor(heads_of_kv);
    of_section_tiles = divisor(int64_t{section} * blocks);
    of_section = divisor(section), of_last_section = divisor(last_section);
    of_short_section = divisor(section == 0 ? 0 : early_heads % section);
  }
};

// Tile `number` of dense sequences, or such a part. Sections of heads come one after the other;
// within one the last blocks first: of queries they see the most keys under a causal mask.
__device__ inline Tile dense_tile(const TileSchedule& schedule, int number, int parts = 1) {
  const int blocks = schedule.blocks, early_heads = schedule.early_heads;
  int section_begin = early_heads, in_section = schedule.last_section;
  Divisor of_section = schedule.of_last_section;
  if (number < early_heads * blocks) {
    section_begin = schedule.of_section_tiles.quotient(number) * schedule.section;
    in_section = min(schedule.section, early_heads - section_begin);
    of_section = in_section == schedule.section ? schedule.of_section : schedule.of_short_section;
  }
  const int rest = number - section_begin * blocks, row = of_section.quotient(rest);
  const int head_part = section_begin + rest - row * in_section;
  const int batch_head = parts == 1 ? head_part : schedule.of_splits.quotient(head_part);
  const int batch = schedule.of_heads.quotient(batch_head);
  const int head = batch_head - batch * schedule.heads, block = blocks - 1 - row;
  return {block,
          head,
          schedule.of_heads_of_kv.quotient(head),
          batch,
          head_part - batch_head * parts,
          parts,
          parts == 1 ? number - schedule.whole : batch_head * blocks + block};
}

// Where all tiles are divided, the one that leaves its parts at `place`. Of packed sequences it may
// lie behind the last block of one.
__device__ inline Tile divided_tile(const TileSchedule& schedule, int place) {
  const int batch_head = place / schedule.blocks, batch = schedule.of_heads.quotient(batch_head);
  const int head = batch_head - batch * schedule.heads;
  return {place % schedule.blocks, head, schedule.of_heads_of_kv.quotient(head), batch, 0,
          schedule.splits,         place};
}

// Of dense sequences, the tile or part with this ticket.
__device__ inline Tile tile_of_ticket(const TileSchedule& schedule, int ticket) {
  if (schedule.whole == 0) return dense_tile(schedule, ticket, schedule.splits);
  if (ticket < schedule.whole) return dense_tile(schedule, ticket);
  const int rest = ticket - schedule.whole, divided = schedule.of_splits.quotient(rest);
  Tile tile = dense_tile(schedule, schedule.whole + divided);
  tile.part = rest - divided * schedule.splits;
  tile.parts = schedule.splits;
  return tile;
}

}  // namespace flash::sm90
