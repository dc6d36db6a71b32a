// Work sharing on the thread pool the process already has: torch's. A second OpenMP runtime would double the threads.
#include <stddef.h>

#include "nightmill.h"

static nm_parallel_fn run_team = NULL;

int nm_abi(void) { return NM_ABI; }

void nm_set_parallel(nm_parallel_fn parallel) { run_team = parallel; }

struct loop {
  int64_t next, count, grain;
  void (*body)(int64_t, int64_t, void *);
  void *data;
};

static void work(void *arg) {
  struct loop *loop = arg;
  for (;;) {
    int64_t first = __atomic_fetch_add(&loop->next, loop->grain, __ATOMIC_RELAXED);
    if (first >= loop->count) return;
    int64_t last = first + loop->grain;
    loop->body(first, last < loop->count ? last : loop->count, loop->data);
  }
}

void nm_for(int64_t count, int64_t grain, int threads, void (*body)(int64_t, int64_t, void *), void *data) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  int64_t pieces = (count + grain - 1) / grain;
  if (threads > pieces) threads = (int)pieces;
  if (threads <= 1 || run_team == NULL) {
    body(0, count, data);
    return;
  }
  struct loop loop = {0, count, grain, body, data};
  run_team(work, &loop, (unsigned)threads, 0);
}
