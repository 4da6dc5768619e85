// What a Hopper forward with some tile shape has: warps, registers, shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "sm90/forward_tile.h"
#include "sm90/pipeline.cuh"
#include "sm90/probabilities.cuh"
#include "sm90/split.cuh"
#include "sm90/square_transposer.cuh"
#include "sm90/tile_layout.cuh"
#include "sm90/tile_range.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/warpgroup_matmul.cuh"

namespace flash::sm90 {

// What a block of quantised keys and its values are multiplied by.
struct BlockScales {
  float k, v;  // v: 1 of values in 16 bits
};

// What P is multiplied by to sum its rows has 8 rows of so many bytes.
constexpr int kOnesRowBytes = 64;

// kDivided_: whether the keys of tiles are divided. (Where they are not, its mere code would make
// the main loop slower.)
template <typename T_, typename V_, typename Out_, int kHeadDim_, int kHeadDimV_,
          FeatureSet kFeatures_, Values kValues_, int kChoice, bool kDivided_>
struct ForwardConfig {
  using T = T_;      // of Q and K
  using V = V_;      // of V
  using Out = Out_;  // of the output
  static constexpr bool kQuantised = sizeof(T) == 1;
  static constexpr bool kQuantisedValues = sizeof(V) == 1;
  static constexpr Values kValues = kValues_;
  static constexpr bool kScaledValues = kValues == Values::kScaled;
  static constexpr bool kScaled = kScaledValues || kValues == Values::kOf16Bits;  // keys, queries
  // Values come in rows of keys: warps transpose them in shared memory.
  static constexpr bool kTransposes = kValues == Values::kRows;
  using Query = std::conditional_t<kScaled, Out, T>;
  static constexpr bool kDivided = kDivided_;
  // Beside tiles left over a pass transposes values.
  static constexpr bool kMayFollowWhole = kDivided && !kTransposes;
  static constexpr ForwardTile kTile =
      kQuantised ? quantised_tile(kHeadDim_, kFeatures_, kValues_)
                 : forward_tile(kHeadDim_, kHeadDimV_, kFeatures_, kChoice);
  using Params = std::conditional_t<kQuantised, QuantisedParams, ForwardParams>;
  static constexpr bool kWhole = std::is_same_v<T, int8_t>;
  using Score = std::conditional_t<kWhole, int, float>;  // of Q K^T
  static constexpr FeatureSet kFeatures = kFeatures_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  // Who rounds queries needs no second stage: each warp writes the rows that it multiplies.
  static constexpr int kQStages = kScaled ? 1 : kTile.q_stages;

  static constexpr int kStreams = kTile.streams;

  static constexpr int kConsumers = kBlockM / kWarpgroupRows;  // warpgroups of a stream
  static constexpr int kConsumerWarps = kConsumers * 4;
  // Warps that transpose values, two squares each. If there are two, who loads keys loads V too.
  static constexpr int kTransposers = kTransposes ? kHeadDimV * kBlockN / (2 * kSquareBytes) : 0;
  static constexpr bool kTwoTranspose = kTransposers == 2;
  static_assert(kTransposers <= 2);
  // Of tiles, beside the consumers.
  static constexpr int kReceivers = kStreams == 2 ? 0 : 2 + kTransposes;
  // One warpgroup more: the scheduler and two producers, or for each stream a warp that is all.
  static constexpr int kThreads = (kStreams * kConsumers + 1) * kWarpgroup;
  // Registers of a thread. All start with 65536 / kThreads, rounded down to a multiple of 8.
  static constexpr int kThreeProducers = kTransposes ? 56 : 32,
                       kThreeConsumers = kTransposes ? 152 : 160;
  static constexpr int kProducerRegisters = kStreams * kConsumers > 2 ? kThreeProducers : 40;
  static constexpr int kConsumerRegisters = kStreams == 2     ? 112
                                            : kConsumers == 3 ? kThreeConsumers
                                                              : 232;
  // Whether a row of Q that is no query's, and what it holds in e4m3, has a say in when the
  // references of a warp's other rows rise. (Where queries are rounded it is 0.)
  static constexpr bool kSpareRowsCount = kQuantised && !kScaled;
  // Beside long products exponentials cost nothing, but scores that have scales cost more.
  static constexpr bool kLinear = kQuantisedValues && (kHeadDimV <= 128 || kScaled);
  // Of rounded probabilities. The less, the further a reference may lag: faster. The more, the more
  // exact is a probability that is most of its row: of operands that are not rotated P's part of
  // the error is small.
  static constexpr int kRoundedBits = 3;
  static constexpr bool kManyRegisters = kConsumers == 2 && kStreams == 1;
  // Steps of Q, kWgmmaDepth columns each, that consumers keep in registers where there is room and
  // it pays (docs/design-notes.md): their products read less shared memory.
  static constexpr int kAllSteps = kHeadDim / kWgmmaDepth<T>;
  static constexpr bool kKeepsQ =
      kDivided ? !kScaled && kHeadDim == 256 : !kScaled || (kLinear && kHeadDim <= 128);
  static constexpr int kQSteps = !kQuantised                 ? kTile.q_steps
                                 : kManyRegisters && kKeepsQ ? kAllSteps
                                                             : 0;
  static constexpr bool kQInRegisters = kQSteps == kAllSteps;
  // Registers of P that are computed beside P V of the block before, as measured
  // (docs/design-notes.md): of 16 bits, linear, rounded.
  static constexpr int kWideAhead = kDivided || kHeadDim == 128 ? 0
                                    : kHeadDim == 256           ? 8
                                    : kHeadDim == 192           ? 4
                                                                : 2;
  static constexpr int kAllCodes = kBlockN / 8;
  static constexpr int kLinearAhead = !kManyRegisters                         ? (kWhole ? 0 : 2)
                                      : kHeadDim == 192                       ? (kWhole ? 2 : 4)
                                      : kHeadDim == 128 && kScaled && !kWhole ? 4
                                                                              : kAllCodes;
  static constexpr int kRoundedAhead = !kManyRegisters || (kTransposes && !kDivided) ? 0
                                       : kQInRegisters                               ? 2
                                                                                     : 4;
  static constexpr int kAhead = !kQuantisedValues ? kWideAhead
                                : kLinear         ? kLinearAhead
                                                  : kRoundedAhead;
  // Whether consumers keep the thread's number in a register (common/warp.h), as measured.
  static constexpr bool kKeepsThread =
      kQuantisedValues && (kTransposes ? kHeadDim == 128 : kHeadDim == 64);
  // Whether long rows are summed (long_sum.cuh). Where exponentials are rounded and keys are not
  // divided, a kernel that transposes values could not sum as its fellow does, bit for bit: it
  // takes kSummedKeys at most.
  static constexpr bool kSums = kQuantisedValues && !(kTransposes && !kLinear && !kDivided);
  using Probabilities = std::conditional_t<
      !kQuantisedValues, WideProbabilities<V, kBlockN / 8, kAhead>,
      std::conditional_t<kLinear, LinearProbabilities<kBlockN / 8, kAhead>,
                         RoundedProbabilities<kBlockN / 8, kRoundedBits, kAhead>>>;
  static constexpr float kProbabilityUnit = 1.f / (1 << Probabilities::kBits);
  // Of 8 bits turns pay at two head dims only (docs/design-notes.md).
  static constexpr bool kTurns =
      kStreams == 1 &&
      (!kQuantised || kHeadDim == 96 || (kHeadDim == 128 && kLinear && (kScaled || kTransposes)));
  static_assert(kProducerRegisters + kStreams * kConsumers * kConsumerRegisters <=
                65536 / kThreads / 8 * 8 * (kStreams * kConsumers + 1));

  static_assert(kBlockM % kWarpgroupRows == 0 && (kConsumers == 2 || kConsumers == 3));
  static_assert(kBlockN % kWgmmaDepth<T> == 0 && kHeadDimV <= kHeadDim);
  static_assert(!kQuantised || kScaledKeys % kBlockN == 0);
  // What a lane keeps of four accumulators in a long sum: of wide values the upper 24 bits of each,
  // which leaves room for a third stage or, of 192 columns, for blocks of 128 keys.
  static constexpr int kSumWords = kHeadDimV > 128 ? 3 : 4;
  static_assert(!kTransposes || (kHeadDimV % kSquareRows == 0 && kBlockN % kSquareRows == 0));
  // V, or its transpose: a block in a row, or what a square has of it.
  static constexpr int kValueRowBytes = kTransposes ? kSquareRows : kBlockN;
  static constexpr int kValueTile =
      kQuantisedValues ? kHeadDimV * kBlockN : kTileSize<V, kBlockN, kHeadDimV>;

  using Range = TileRange<kBlockN, kFeatures == FeatureSet::kFull, kDivided || !kQuantised>;
  // What the scheduler sends. Where operands have 16 bits each warp finds the range, as their main
  // loop would be slower; a part of a tile is the only one of its thread block.
  using Sent = std::conditional_t<kQuantised && !kDivided, RangedTile<Range>, Tile>;

  // A wide output goes through shared memory: TMA stores it beside the next tile.
  static constexpr bool kStagedOutput = kQuantisedValues && kHeadDimV > 128 && !kDivided;

  struct Nothing {};
  // Of a consumer warp: sums (long_sum.cuh), and in the end its output.
  union alignas(1024) WarpStage {
    uint32_t sums[kHeadDimV / 8][kSumWords][32];
    std::conditional_t<kStagedOutput, Out[kTileSize<Out, kWarpRows, kHeadDimV>], Nothing> out;
  };
  using WarpStages = std::conditional_t<kQuantisedValues, WarpStage[kConsumerWarps], Nothing>;
  using Part = std::conditional_t<kDivided, TilePart<kBlockM, kHeadDimV>, Nothing>;

  struct Storage {  // of a stream
    union {
      struct {
        alignas(1024) T q[kQStages][kTileSize<T, kBlockM, kHeadDim>];
        alignas(1024) T k[kStages][kTileSize<T, kBlockN, kHeadDim>];
        alignas(1024) V v[kStages][kValueTile];
        WarpStages warp_stages;
      };
      Part part;  // in the end
    };
    Pipeline<kQStages> q_pipeline;
    Pipeline<kStages> k_pipeline;
    Pipeline<kStages> v_pipeline;
    uint64_t tail_full;  // the last block of V, whose rows past the sequence are cleared first
    TilePipeline<Sent> tiles;
    uint64_t tile_wanted;  // of one stream: all of the last tile's keys are on their way
  };
  struct QuantisedStorage : Storage {
    std::conditional_t<kScaled, BlockScales, Nothing> scales[kStages];  // filled with K
    std::conditional_t<kTransposes, uint64_t, Nothing>
        rows_full[kStages];  // of V, for who transposes
    using Ones = V[8 * kOnesRowBytes];
    alignas(8 * kOnesRowBytes) std::conditional_t<kLinear, Ones, Nothing> ones;
  };
  using SharedStorage = std::conditional_t<kQuantised, QuantisedStorage, Storage>;
  static_assert(kStreams * sizeof(SharedStorage) <= 227 * 1024);
};

}  // namespace flash::sm90
