// Who computes what and when: tiles in an order that keeps both the arithmetic and the memory busy.
//
//   task  ┌ a tile that computes: of a prefill or of a group ┐┌ decode ┐┌ decode ┐┌ …
//         └ … and asks for the decodes' keys meanwhile ──────┘└────────┘└────────┘└ …
//
// A prefill computes for longer than its keys take to arrive, a decode waits for its keys. So each tile of many rows is
// given decodes to be computed after it, as many as its share of the computing, and asks for their keys in its inner
// loops: by the time they are needed they are in the core's cache. The decodes of a group follow the group's tile, whose
// results they go on from. What is left are tasks of a few decodes, each asking for the keys of the next.
#ifndef NIGHTMILL_TASKS_H
#define NIGHTMILL_TASKS_H

#include <stdlib.h>

#include "groups.h"

enum {
  BUSY_ROWS = 4 * STRIP,      // a tile of so many rows computes for longer than it waits
  MAX_AFTER = 384 << 10,      // bytes of keys after which a busy tile is given no more decodes: they have to fit a cache
  MOST_DECODES = 4,           // of a task of decodes alone
  ALL_SEGMENTS = -1,
};

struct task {
  const struct tile *tile;  // NULL, a group's tile, or a sequence's
  int32_t segment;          // of it: ALL_SEGMENTS, or the one to sum up into its partial result
  int64_t first, count;     // the tiles after it
};

struct work {
  const struct nm_attention *call;
  struct tile *tiles;
  float *partials;
  struct group *groups;
  struct place *places;
  struct tile *group_tiles;
  float *states;
  struct task *tasks;
  const struct tile **after;
  int64_t num_tiles, num_group_tiles, num_tasks, num_after;
};

// Lists of a call, kept for the next one: what malloc gives back to the system comes again as page faults, in each layer.
enum list { TILES_OF_CALL, GROUPS, PLACES, GROUP_TILES, STATES, TASKS, AFTER, NUM_LISTS };
static _Thread_local struct {
  void *at;
  size_t size;
} lists[NUM_LISTS];

// NULL where there is no memory. What was there is lost.
static void *reserve(enum list list, size_t size) {
  if (lists[list].size >= size) return lists[list].at;
  free(lists[list].at);
  lists[list].at = malloc(size + size / 4);
  lists[list].size = lists[list].at ? size + size / 4 : 0;
  return lists[list].at;
}

static int rows_of(const struct nm_attention *call, const struct tile *tile) {
  return tile->count * (call->heads / call->kv_heads);
}

static int keys_of(const struct tile *tile) { return larger(0, tile->high - larger(tile->resume, tile->low)); }

static int64_t bytes_of(const struct nm_attention *call, const struct tile *tile) {
  return 2 * (int64_t)keys_of(tile) * call->head_dim * (call->dtype == NM_BF16 ? 2 : 4);
}

static int64_t cost_of(const struct nm_attention *call, const struct tile *tile) {
  return (int64_t)rows_of(call, tile) * keys_of(tile);
}

// The keys of `count` tiles, over the strips of one that is computed before them.
static void start_fetch(const struct nm_attention *call, const struct tile *tile, const struct tile *const *after,
                        int64_t count, struct fetch *fetch) {
  *fetch = (struct fetch){.tiles = after, .num_tiles = count};
  if (tile == NULL || count == 0) {
    fetch->num_tiles = 0;
    return;
  }
  int64_t groups = 0;
  for (int64_t i = 0; i < count; i++) groups += keys_of(after[i]) / GROUP + 2;
  const int64_t strips = (int64_t)((rows_of(call, tile) + STRIP - 1) / STRIP) * (keys_of(tile) / KEYS + 1);
  const int64_t rate = groups * FETCH_UNIT / strips + 1;
  fetch->rate = (int32_t)(rate < FETCH_GROUPS * FETCH_UNIT ? rate : FETCH_GROUPS * FETCH_UNIT);
  fetch->key = first_group(after[0]);
}

static struct task *add_task(struct work *work, const struct tile *tile, int segment) {
  struct task *task = work->tasks + work->num_tasks++;
  *task = (struct task){tile, segment, work->num_after, 0};
  return task;
}

static void add_after(struct work *work, struct task *task, const struct tile *tile) {
  work->after[work->num_after++] = tile;
  task->count++;
}

static void add_group_task(struct work *work, const struct tile *tile) {
  struct task *task = add_task(work, tile, ALL_SEGMENTS);
  for (int i = 0; i < tile->count; i++)
    add_after(work, task, work->tiles + work->places[tile->members[i]].tile + tile->kv_head);
}

static int is_busy(const struct work *work, const struct tile *tile) {
  return tile->partial < 0 && tile->resume == 0 && rows_of(work->call, tile) >= BUSY_ROWS;
}

static int is_idle(const struct work *work, const struct tile *tile) {
  return tile->partial < 0 && tile->resume == 0 && !is_busy(work, tile);
}

// From `at` on, the first tile that waits for memory; num_tiles: none is left.
static int64_t next_idle(const struct work *work, int64_t at) {
  while (at < work->num_tiles && !is_idle(work, work->tiles + at)) at++;
  return at;
}

struct totals {
  int64_t busy, num_busy, bytes;
};

static struct totals count_totals(const struct work *work) {
  struct totals totals = {0};
  for (int64_t i = 0; i < work->num_tiles; i++) {
    const struct tile *tile = work->tiles + i;
    if (is_busy(work, tile)) totals.busy += cost_of(work->call, tile), totals.num_busy++;
    if (is_idle(work, tile)) totals.bytes += bytes_of(work->call, tile);
  }
  return totals;
}

// Gives a busy tile decodes for its share of the computing: `bytes` of keys were given to it and those before it after.
static void give_decodes(struct work *work, struct task *task, int64_t *idle, int64_t *bytes, double share) {
  for (int64_t mine = 0; *idle < work->num_tiles && mine < MAX_AFTER && (double)*bytes < share;
       *idle = next_idle(work, *idle + 1)) {
    const struct tile *tile = work->tiles + *idle;
    add_after(work, task, tile);
    *bytes += bytes_of(work->call, tile);
    mine += bytes_of(work->call, tile);
  }
}

// Tiles that compute, the groups' among them at even distances, and the decodes they are given; returns the first that
// is left. Small tiles come last: a long one then would keep everyone waiting.
static int64_t list_busy_tasks(struct work *work) {
  const struct totals totals = count_totals(work);
  int64_t idle = next_idle(work, 0), cost = 0, bytes = 0, place = 0, group = 0;
  for (int small = 0; small < 2; small++)
    for (int64_t i = 0; i < work->num_tiles; i++) {
      const struct tile *tile = work->tiles + i;
      if (!is_busy(work, tile) || (2 * cost_of(work->call, tile) * totals.num_busy < totals.busy) != small) continue;
      for (; group < (small ? work->num_group_tiles : work->num_group_tiles * (2 * place + 1) / (2 * totals.num_busy));
           group++)
        add_group_task(work, work->group_tiles + group);
      cost += cost_of(work->call, tile), place++;
      give_decodes(work, add_task(work, tile, ALL_SEGMENTS), &idle, &bytes,
                   (double)totals.bytes * (double)cost / (double)totals.busy);
    }
  for (; group < work->num_group_tiles; group++) add_group_task(work, work->group_tiles + group);
  return idle;
}

static void list_segments(struct work *work) {
  for (int64_t i = 0; i < work->num_tiles; i++)
    for (int k = 0; work->tiles[i].partial >= 0 && k < num_segments(work->tiles + i); k++)
      add_task(work, work->tiles + i, k);
}

// Returns 0 where there is no memory for it.
static int list_tasks(struct work *work) {
  int64_t most = work->num_group_tiles + work->num_tiles;
  for (int64_t i = 0; i < work->num_tiles; i++)
    if (work->tiles[i].partial >= 0) most += num_segments(work->tiles + i);
  work->tasks = reserve(TASKS, sizeof(struct task) * (size_t)most);
  work->after = reserve(AFTER, sizeof(struct tile *) * (size_t)work->num_tiles);
  if (!work->tasks || !work->after) return 0;
  list_segments(work);
  int64_t left = 0, idle = list_busy_tasks(work);
  for (int64_t at = idle; at < work->num_tiles; at = next_idle(work, at + 1)) left++;
  const int64_t each = larger(1, smaller(MOST_DECODES, (int)(left / (8 * larger(1, work->call->threads)))));
  while (idle < work->num_tiles) {
    struct task *task = add_task(work, NULL, ALL_SEGMENTS);
    for (int64_t k = 0; k < each && idle < work->num_tiles; k++, idle = next_idle(work, idle + 1))
      add_after(work, task, work->tiles + idle);
  }
  return 1;
}

#endif
