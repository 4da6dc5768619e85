// Which tiles there are, and the order in which those of dense sequences are handed out.
#pragma once

namespace flash::sm90 {

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

  __host__ __device__ int count_tickets() const {
    return whole + (splits == 1 ? 0 : (tiles - whole) * splits);
  }
};

struct alignas(16) Tile {
  int block, head, head_kv, batch;  // batch -1: no tile is left
  int part, parts;
  int place;  // where it leaves its parts, if it is divided
};

// Tile `number` of dense sequences, or such a part. Sections of heads come one after the other;
// within one the last blocks first: of queries they see the most keys under a causal mask.
__device__ inline Tile dense_tile(const TileSchedule& schedule, int number, int parts = 1) {
  const int blocks = schedule.blocks;
  const int early_heads = schedule.tiles / blocks * parts - schedule.last_section;
  int section_begin = early_heads, in_section = schedule.last_section;
  if (number < early_heads * blocks) {
    section_begin = number / (schedule.section * blocks) * schedule.section;
    in_section = min(schedule.section, early_heads - section_begin);
  }
  const int rest = number - section_begin * blocks;
  const int head_part = section_begin + rest % in_section, batch_head = head_part / parts;
  const int head = batch_head % schedule.heads, block = blocks - 1 - rest / in_section;
  return {block,
          head,
          head / schedule.heads_of_kv,
          batch_head / schedule.heads,
          head_part % parts,
          parts,
          parts == 1 ? number - schedule.whole : batch_head * blocks + block};
}

// Where all tiles are divided, the one that leaves its parts at `place`. Of packed sequences it may
// lie behind the last block of one.
__device__ inline Tile divided_tile(const TileSchedule& schedule, int place) {
  const int batch_head = place / schedule.blocks, head = batch_head % schedule.heads;
  return {
      place % schedule.blocks, head, head / schedule.heads_of_kv, batch_head / schedule.heads, 0,
      schedule.splits,         place};
}

// Of dense sequences, the tile or part with this ticket.
__device__ inline Tile tile_of_ticket(const TileSchedule& schedule, int ticket) {
  if (schedule.whole == 0) return dense_tile(schedule, ticket, schedule.splits);
  if (ticket < schedule.whole) return dense_tile(schedule, ticket);
  const int rest = ticket - schedule.whole;
  Tile tile = dense_tile(schedule, schedule.whole + rest / schedule.splits);
  tile.part = rest % schedule.splits;
  tile.parts = schedule.splits;
  return tile;
}

}  // namespace flash::sm90
