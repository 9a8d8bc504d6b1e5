// Copies runs of bytes between paged memories, host memory included: for pages too small for the
// copy engine. Runs are cut into pieces of PIECE bytes; a warp has STAGES pieces on their way. BYTES
// (4, 8, 16) is the widest access that all offsets allow.
#include "common.cuh"

constexpr int kStages = STAGES;
constexpr int kPiece = PIECE;

using Word = Words<BYTES>;

// sources, targets: [runs], byte offsets. Shared memory: warps × kStages × kPiece.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    copy_runs(const char* source, char* target, const i64* sources, const i64* targets,
            i64 runs, i64 run_bytes) {
  SHARED_BYTES(shared);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  // Counts fit 32 bits, the host sees to it.
  const unsigned warps = gridDim.x * (blockDim.x / kWarp);
  const unsigned me = blockIdx.x * (blockDim.x / kWarp) + warp;
  const unsigned per_run = static_cast<unsigned>((run_bytes + kPiece - 1) / kPiece);
  const unsigned pieces = static_cast<unsigned>(runs) * per_run;
  const Ring<kStages, BYTES> ring{shared + warp * kStages * kPiece, kPiece};
  auto offset_of = [&](unsigned piece) { return static_cast<i64>(piece % per_run) * kPiece; };
  auto size_of = [&](unsigned piece) {
    i64 left = run_bytes - offset_of(piece);
    return static_cast<int>(left < kPiece ? left : kPiece);
  };
  auto fetch = [&](unsigned step) {
    unsigned piece = me + step * warps;
    if (piece < pieces)
      ring.fetch(step, source + sources[piece / per_run] + offset_of(piece), size_of(piece), lane);
    copy_commit();
  };
  for (unsigned step = 0; step < kStages - 1; ++step) fetch(step);
  for (unsigned step = 0; me + step * warps < pieces; ++step) {
    fetch(step + kStages - 1);
    copy_wait<kStages - 1>();
    warp_barrier();
    unsigned piece = me + step * warps;
    char* out = target + targets[piece / per_run] + offset_of(piece);
    for (int at = lane * BYTES; at < size_of(piece); at += kWarp * BYTES)
      *reinterpret_cast<Word*>(out + at) = *reinterpret_cast<const Word*>(ring.slot(step) + at);
    warp_barrier();
  }
  copy_wait<0>();
}
HOST_ENTRY(copy_runs)
