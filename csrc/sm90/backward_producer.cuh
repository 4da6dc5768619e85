// What the producers of Hopper backwards share: loads of a block of rows.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "params.h"
#include "sm90/backward_rows.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tma_load.cuh"

namespace flash::sm90 {

// To shared memory, from global memory.
struct BulkCopy {
  void* target;
  const void* source;
  int bytes;
};

template <typename Config>
struct BackwardProducer {
  using T = typename Config::T;

  const BackwardParams& params;
  const BackwardMaps& maps;
  const BackwardSchedule& schedule;
  typename Config::SharedStorage& shared;
  const int lane;
  uint32_t tail_phases = 0;  // a bit of each barrier

  // Starts the load of kRows rows of a tensor, from row `row` of a sequence on. Of them
  // `valid_rows` are the sequence's; if `clear`, the others become zero by finish_load.
  // beside: what comes with them
  template <int kRows, int kCols>
  __device__ void load(Tail tail, T* tile, const CUtensorMap& map, uint64_t& full, int slot,
                       int first, int head, int row, int valid_rows, bool clear,
                       const BulkCopy& beside = {}, int first_part = 0) {
    const BlockTable table{};
    const SequenceRows rows{slot, 0, first, head, table};
    uint64_t& barrier = clear && valid_rows < kRows ? shared.tail_full[tail] : full;
    load_rows<kRows, kCols>(tile, map, barrier, rows, row, kRows, lane, beside.bytes, first_part);
    if (lane == 0 && beside.bytes > 0) {
      cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, beside.target,
                               beside.source, beside.bytes, &barrier);
    }
  }
  // Waits for rows behind the sequence and clears them. Loads of other tensors that have started
  // arrive meanwhile.
  template <int kCols>
  __device__ void finish_load(int tail, T* tile, uint64_t& full, int rows, int valid_rows,
                              bool clear) {
    if (!clear || valid_rows >= rows) return;
    wait(shared.tail_full[tail], tail_phases >> tail & 1);
    tail_phases ^= 1u << tail;
    clear_tail<kCols>(tile, rows, valid_rows, lane);
    arrive_of_warp(full, lane);
  }

  // The block of queries of a step. rows: the sequence
  template <int kCols, typename Pipeline, typename Stages>
  __device__ void load_queries(Tail tail, Pipeline& pipeline, typename Pipeline::State state,
                               Stages& stages, const CUtensorMap& map, const Sequence& rows,
                               const StepIterator& step, const BulkCopy& beside = {}) {
    const int m_begin = step.m_block * Config::kBlockM;
    pipeline.wait_empty(state);
    load<Config::kBlockM, kCols>(tail, stages[state.stage()], map, pipeline.full[state.stage()],
                                 rows.q_batch, rows.q_first, step.head, m_begin,
                                 rows.seqlen_q - m_begin, schedule.clear_tail_q, beside);
  }

  // There are no more steps than `count`.
  __device__ void announce_end(uint32_t count) {
    shared.q_pipeline.wait_empty(PipelineState<Config::kStages>{count});
    if (lane == 0) shared.steps.tell(PipelineState<Config::kStepSlots>{count}, {-1, 0, true});
  }

  // In the workspaces. first_tile: of the sequence
  __device__ int row_tile(const StepIterator& step, int first_tile) const {
    return step.head * params.row_tiles + first_tile + step.m_block;
  }
  // What comes with Q of a step. state: of Q
  __device__ BulkCopy statistics(const StepIterator& step, int first_tile,
                                 PipelineState<Config::kStages> state) const {
    return {shared.statistics[state.stage()],
            params.row_statistics + int64_t{row_tile(step, first_tile)} * (2 * Config::kBlockM),
            sizeof(shared.statistics[0])};
  }

  // Says where a step's dQ goes. state: of Q, whose stage is empty
  __device__ void announce(const KeyTileRange<Config>& range, const StepIterator& step,
                           int first_tile, PipelineState<Config::kStages> state) {
    if (lane == 0) {
      const int turn =
          params.dq_turn == nullptr ? range.n_block : range.turn(schedule, step.m_block);
      const PipelineState<Config::kStepSlots> slot{state.count};
      if constexpr (Config::kWritesDq) {
        const Sequence& rows = range.sequence;
        const int m_begin = step.m_block * Config::kBlockM;
        shared.step_queries[slot.stage()] = {step.head, rows.q_batch, rows.q_first + m_begin,
                                             min(Config::kBlockM, rows.seqlen_q - m_begin)};
      }
      shared.steps.tell(slot, {row_tile(step, first_tile), turn, step.left == 1});
    }
  }
};

}  // namespace flash::sm90
