// The order of tiles (sm90/dense_tiles.h), compiled for the host: tickets name every part of every
// tile once, longest tiles of a section first, and divided tiles have places of their own.
#include "sm90/dense_tiles.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <tuple>

using namespace flash::sm90;

std::mt19937 engine(1);
int random_from(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }

void expect(bool holds, const char* what, int ticket) {
  if (holds) return;
  std::printf("ticket %d: %s\n", ticket, what);
  std::exit(1);
}

auto tile_name(const Tile& tile) { return std::tuple(tile.batch, tile.head, tile.block); }

int main() {
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
