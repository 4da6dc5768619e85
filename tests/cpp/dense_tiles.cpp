// The order of tiles (sm90/dense_tiles.h), compiled for the host: tickets name every part of every
// tile once, longest tiles of a section first, and divided tiles have places of their own. The same
// of tiles with unequally many parts (sm90/unequal_tiles.h).
#include "sm90/dense_tiles.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <tuple>

#include "sm90/unequal_tiles.h"

using namespace flash;
using namespace flash::sm90;

std::mt19937 engine(1);
int random_from(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }

void expect(bool holds, const char* what, int ticket) {
  if (holds) return;
  std::printf("ticket %d: %s\n", ticket, what);
  std::exit(1);
}

// Tickets name each part of each tile once, those of the first keys first, and parts of divided
// tiles have places of their own.
void expect_unequal_parts() {
  UnequalParts unequal{};
  unequal.blocks = random_from(1, kMostUnequalBlocks);
  for (int i = 0; i < unequal.blocks; ++i) {
    unequal.first[i + 1] = unequal.first[i] + random_from(1, 5);
  }
  const int batch = random_from(1, 3), of_head = unequal.first[unequal.blocks];
  TileSchedule schedule{};
  schedule.splits = schedule.heads_of_kv = 1;
  schedule.heads = random_from(1, 3);
  schedule.blocks = of_head;
  schedule.tiles = schedule.whole = schedule.tickets = batch * schedule.heads * of_head;
  schedule.section = schedule.last_section = batch * schedule.heads;
  schedule.complete();

  std::set<std::tuple<int, int, int, int>> parts;
  std::set<int> places;
  for (int ticket = 0, last_block = 0; ticket < schedule.tickets; ++ticket) {
    const Tile tile = unequal_part(schedule, unequal, tile_of_ticket(schedule, ticket));
    const int n_block = schedule.blocks - 1 - tile.block;
    expect(n_block >= last_block && n_block < unequal.blocks, "no such block", ticket);
    expect(tile.batch >= 0 && tile.batch < batch && tile.head >= 0 && tile.head < schedule.heads &&
               tile.head_kv == tile.head,
           "no such head", ticket);
    expect(tile.parts == unequal.first[n_block + 1] - unequal.first[n_block], "parts", ticket);
    expect(tile.part >= 0 && tile.part < tile.parts, "no such part", ticket);
    expect(parts.emplace(tile.batch, tile.head, n_block, tile.part).second, "twice", ticket);
    const int place = tile.place + tile.part;
    expect(place < schedule.tiles && places.insert(place).second, "another's place", ticket);
    const int number = (tile.batch * schedule.heads + tile.head) * unequal.blocks + n_block;
    const Tile first = unequal_tile(schedule, unequal, number);
    expect(first.batch == tile.batch && first.head == tile.head && first.block == tile.block &&
               first.part == 0 && first.parts == tile.parts && first.place == tile.place,
           "first", ticket);
    last_block = n_block;
  }
}

auto tile_name(const Tile& tile) { return std::tuple(tile.batch, tile.head, tile.block); }

int main() {
  for (int i = 0; i < 500; ++i) expect_unequal_parts();
  for (int i = 0; i < 2000; ++i) {
    TileSchedule schedule{};
    const int batch = random_from(1, 4);
    schedule.splits = random_from(1, 5);
    schedule.heads_of_kv = random_from(1, 3);
    schedule.heads = schedule.heads_of_kv * random_from(1, 3);
    schedule.blocks = random_from(1, 6);
    schedule.tiles = batch * schedule.heads * schedule.blocks;
    const bool all_divided = schedule.splits > 1 && random_from(0, 1) == 1;
    schedule.whole = all_divided            ? 0
                     : schedule.splits == 1 ? schedule.tiles
                                            : random_from(1, schedule.tiles);
    const int heads = batch * schedule.heads * (all_divided ? schedule.splits : 1);
    schedule.section = random_from(1, heads);
    schedule.last_section = random_from(1, heads);
    schedule.complete();

    std::set<std::tuple<int, int, int, int>> parts;
    std::set<std::tuple<int, int, int>> divided;
    schedule.tickets = schedule.count_tickets();
    for (int ticket = 0; ticket < schedule.tickets; ++ticket) {
      const Tile tile = tile_of_ticket(schedule, ticket);
      expect(tile.batch >= 0 && tile.batch < batch && tile.head >= 0 &&
                 tile.head < schedule.heads && tile.block >= 0 && tile.block < schedule.blocks,
             "no such tile", ticket);
      expect(tile.head_kv == tile.head / schedule.heads_of_kv, "other keys", ticket);
      expect(tile.parts == 1 || tile.parts == schedule.splits, "other parts", ticket);
      expect(tile.part >= 0 && tile.part < tile.parts, "no such part", ticket);
      expect(parts.emplace(tile.batch, tile.head, tile.block, tile.part).second, "twice", ticket);
      if (tile.parts == 1) continue;
      divided.insert(tile_name(tile));
      expect(tile.place >= 0 && tile.place < schedule.tiles - schedule.whole, "place", ticket);
      const Tile there = schedule.whole == 0 ? divided_tile(schedule, tile.place)
                                             : dense_tile(schedule, schedule.whole + tile.place);
      expect(tile_name(there) == tile_name(tile), "another tile's place", ticket);
    }
    const int all_divided_tiles = schedule.splits == 1 ? 0 : schedule.tiles - schedule.whole;
    expect(static_cast<int>(divided.size()) == all_divided_tiles, "divided tiles", -1);
    expect(static_cast<int>(parts.size()) == schedule.tickets, "tickets", -1);
  }
}
