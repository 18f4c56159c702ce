// Products on tensor cores: of a warp, `mma.sync`, and of a warpgroup, `wgmma`, which is begun by all threads of four warps,
// and there when each has waited for it.
#pragma once
#include "fibers.hpp"

namespace emulated::products {

void begin_block();
// Whether the warpgroup of a thread has begun what the thread waits for.
bool begun(unsigned thread);
// So many threads, all that there are, have met.
void barrier(unsigned met);
// By `cp.async`, of the current thread.
void copy_begins(const void *to);
void copy_arrives(const void *to);

} // namespace emulated::products
