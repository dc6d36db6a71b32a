// How the work of a linear layer is cut and shared: strips of a few rows against panels of 64 columns.
//
//        panel 0   panel 1   …        A thread takes a run of strips, panel after panel, so that a panel is read from
// rows  ┌─────────┬─────────┬──       memory once and serves all strips of the run from the cache. Runs get shorter
// 0-5   │ strip 0 │ strip n │         towards the end: whoever was held up takes fewer. Which strips there are depends
// 6-11  │ strip 1 │   …     │         on the number of rows alone, and what a row gets not even on that.
//   …   │   …     │         │
#ifndef NIGHTMILL_LINEAR_WORK_H
#define NIGHTMILL_LINEAR_WORK_H

#include "nightmill.h"
#include "vec.h"

enum {
  PANEL = 64,        // columns whose weights lie together
  STRIP_ROWS = 6,    // with 4 vectors each they fill AVX-512's registers but for what they are multiplied with
  CHUNK_ROWS = 192,  // rows that go through all panels together; a multiple of STRIP_ROWS
};

// Strips [first, last) of rows [row, row + rows), at most CHUNK_ROWS, against one panel.
struct run {
  int64_t panel, row, rows, first, last;
  int goes_on;  // the same thread takes the next panel next
};

struct strips {
  int64_t next, rows, panels;
  int threads;
  void (*body)(const struct run *run, void *data);
  void *data;
};

INLINE int64_t strips_in(int64_t rows) { return (rows + STRIP_ROWS - 1) / STRIP_ROWS; }

// A strip's first row: they are of equal size, or one less.
INLINE int64_t strip_row(const struct run *run, int64_t strip) {
  return run->row + run->rows * strip / strips_in(run->rows);
}

static int64_t take(struct strips *all, int64_t total, int64_t *last) {
  int64_t first = __atomic_load_n(&all->next, __ATOMIC_RELAXED), size;
  do {
    const int64_t left = total - first;
    if (left <= 0) return -1;
    size = all->threads == 1 ? left : left / (2 * all->threads);
    if (size < 1) size = 1;
  } while (!__atomic_compare_exchange_n(&all->next, &first, first + size, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  *last = first + size;
  return first;
}

static void work_on_strips(int64_t from, int64_t to, void *arg) {
  struct strips *all = arg;
  (void)from, (void)to;
  const int64_t per_chunk = strips_in(CHUNK_ROWS) * all->panels, whole = all->rows / CHUNK_ROWS;
  const int64_t total = whole * per_chunk + strips_in(all->rows % CHUNK_ROWS) * all->panels;
  int64_t last;
  for (int64_t at = take(all, total, &last); at >= 0; at = take(all, total, &last)) {
    while (at < last) {
      const int64_t chunk = at / per_chunk;
      struct run run = {.row = chunk * CHUNK_ROWS};
      run.rows = all->rows - run.row < CHUNK_ROWS ? all->rows - run.row : CHUNK_ROWS;
      const int64_t strips = strips_in(run.rows), inside = at - chunk * per_chunk;
      run.panel = inside / strips;
      run.first = inside % strips;
      run.last = run.first + (last - at) < strips ? run.first + (last - at) : strips;
      at += run.last - run.first;
      run.goes_on = at < last;
      all->body(&run, all->data);
    }
  }
}

// Calls body for every strip of `rows` against `panels`, on up to `threads` threads.
static inline void for_strips(int64_t rows, int64_t panels, int threads, void (*body)(const struct run *, void *),
                              void *data) {
  const int64_t total = strips_in(rows) * panels;
  if (threads > total) threads = (int)total;
  if (threads < 1) threads = 1;
  struct strips all = {0, rows, panels, threads, body, data};
  nm_for(threads, 1, threads, work_on_strips, &all);
}

#endif
