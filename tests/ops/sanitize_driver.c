// Calls every function of the library on odd shapes, on a team of real threads. Buffers are of the exact size: half of
// them the sanitizer's own, half of them end at a page that cannot be touched, for the sanitizer does not look into all
// vector instructions. Exits 0 when nothing was found; results are judged elsewhere.
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nightmill.h"

static uint64_t state = 1;

static uint32_t random_below(uint32_t n) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 33) % n;
}

static uint32_t between(uint32_t low, uint32_t high) { return low + random_below(high - low + 1); }

static struct {
  void *base;
  size_t mapped;  // 0: from malloc
} given[64];
static int num_given;

static void *give(size_t bytes) {
  void *out;
  if (random_below(2)) {
    out = malloc(bytes);
    given[num_given].base = out;
    given[num_given++].mapped = 0;
    return out;
  }
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
  out = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect((char *)out + whole, page, PROT_NONE);
  given[num_given].base = out;
  given[num_given++].mapped = whole + page;
  return (char *)out + whole - bytes;
}

static void take_back(void) {
  for (int i = 0; i < num_given; i++) {
    if (given[i].mapped)
      munmap(given[i].base, given[i].mapped);
    else
      free(given[i].base);
  }
  num_given = 0;
}

// n elements of random small numbers, not one byte more. NaN fills what no call may use.
static void *numbers(int64_t n, int dtype, int nan) {
  void *out = give((size_t)n * (dtype == NM_BF16 ? 2 : 4));
  for (int64_t i = 0; i < n; i++) {
    float x = nan ? NAN : (float)random_below(2001) / 1000.0f - 1.0f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (dtype == NM_BF16)
      ((uint16_t *)out)[i] = (uint16_t)(bits >> 16);
    else
      ((float *)out)[i] = x;
  }
  return out;
}

struct member {
  void (*fn)(void *);
  void *data;
};

static void *run_member(void *arg) {
  struct member *member = arg;
  member->fn(member->data);
  return NULL;
}

static void team(void (*fn)(void *), void *data, unsigned threads, unsigned flags) {
  (void)flags;
  struct member member = {fn, data};
  pthread_t others[16];
  for (unsigned i = 1; i < threads; i++) pthread_create(&others[i], NULL, run_member, &member);
  fn(data);
  for (unsigned i = 1; i < threads; i++) pthread_join(others[i], NULL);
}

static void expect(int got, const char *what) {
  if (got != NM_OK) {
    fprintf(stderr, "%s returned %d\n", what, got);
    exit(1);
  }
}

// Gives the decodes with at least `shared` full pages those of the first of them; returns how many there are.
static int groups_of(int sequences, const int32_t *starts, const int32_t *contexts, int32_t *tables, int width,
                     int page_size, int shared, int32_t *members) {
  int count = 0;
  for (int s = 0; s < sequences; s++) {
    if (starts[s + 1] - starts[s] != 1 || contexts[s] < shared * page_size) continue;
    memmove(tables + s * width, tables + (count ? members[0] : s) * width, sizeof(int32_t) * (size_t)shared);
    members[count++] = s;
  }
  return count;
}

static void attention(int dtype) {
  static const int dims[] = {16, 64, 80, 96, 128, 256};
  const int sequences = (int)random_below(9), dim = dims[random_below(6)], kv_heads = (int)between(1, 2);
  const int group = (int)between(1, 9), page_size = random_below(2) ? 16 : (int)between(1, 40);
  const int width = 800 / page_size + 1;
  int32_t *starts = give(sizeof(int32_t) * (size_t)(sequences + 1));
  int32_t *contexts = give(sizeof(int32_t) * (size_t)sequences);
  int32_t *tables = give(sizeof(int32_t) * (size_t)(sequences * width));
  const int pages = (int)between(1, 4);
  starts[0] = 0;
  for (int s = 0; s < sequences; s++) {
    contexts[s] = (int32_t)random_below(random_below(4) ? 120 : 780);
    const int length = random_below(2) ? 1 : (int)random_below(50);
    starts[s + 1] = starts[s] + length;
    // Columns a sequence does not need hold ids far outside the pool: reading one is an error.
    for (int p = 0; p < width; p++)
      tables[s * width + p] = p * page_size < contexts[s] ? (int32_t)random_below((uint32_t)pages) : 1 << 30;
  }
  const int shared = (int)random_below(random_below(2) ? (uint32_t)width : 6u);
  int32_t *group_starts = give(sizeof(int32_t) * 3), *group_pages = give(sizeof(int32_t) * 2);
  int32_t *members = give(sizeof(int32_t) * (size_t)sequences);
  const int num_members = groups_of(sequences, starts, contexts, tables, width, page_size, shared, members);
  group_starts[0] = 0;
  group_starts[1] = num_members / 2;
  group_starts[2] = num_members;
  group_pages[0] = group_pages[1] = shared;
  const int64_t tokens = starts[sequences] + random_below(3), heads = kv_heads * group;
  const int64_t pool = (int64_t)pages * kv_heads * page_size * dim;
  struct nm_attention call = {
      .q = numbers(tokens * heads * dim, dtype, 0), .k_pool = numbers(pool, dtype, 0),
      .v_pool = numbers(pool, dtype, 0), .out = numbers(tokens * heads * dim, dtype, 1),
      .query_starts = starts, .context_lens = contexts, .page_tables = tables, .group_starts = group_starts,
      .group_members = members, .group_pages = group_pages, .num_groups = 2, .num_members = num_members,
      .q_stride = heads * dim,
      .out_stride = heads * dim, .pool_stride = (int64_t)kv_heads * page_size * dim, .num_tokens = tokens,
      .num_pages = pages, .num_sequences = sequences, .table_width = width, .heads = (int32_t)heads,
      .kv_heads = kv_heads, .head_dim = dim, .page_size = page_size, .dtype = dtype,
      .window = random_below(2) ? (int32_t)between(1, 200) : 0, .threads = (int32_t)between(1, 4), .scale = 0.125f,
      .softcap = random_below(3) ? 0.0f : 20.0f};
  expect(nm_paged_attention(&call), "nm_paged_attention");
}

static void norm(int dtype) {
  const int64_t outer = random_below(5), inner = between(1, 3), dim = between(1, 70), gap = random_below(4);
  const int64_t n = outer * inner * dim, spread = outer ? n + (outer - 1) * gap : 0;
  void *x = numbers(spread, dtype, 0), *residual = random_below(2) ? numbers(n, dtype, 0) : NULL;
  void *weight = numbers(dim, dtype, 0), *out = numbers(n, dtype, 1);
  struct nm_norm call = {x, residual, weight, out, outer, inner, dim, inner * dim + gap, inner * dim,
                         dtype, (int32_t)between(1, 4), 1e-5f, 0.0f};
  expect(nm_rms_norm(&call), "nm_rms_norm");
}

static void rope(int dtype) {
  const int64_t tokens = random_below(6);
  const int paired = (int)random_below(2), heads = (int)between(1, 4), kv_heads = (int)between(1, 2);
  const int dim = paired ? 32 * (int)between(1, 4) : 2 * (int)between(1, 40), pages = 3, max_len = 10;
  const int rot = 2 * (int)between(1, (uint32_t)dim / 2), page_size = (int)between(1, paired ? 3 : 20) * (paired ? 16 : 1);
  int64_t *slots = give(sizeof(int64_t) * (size_t)tokens), *positions = give(sizeof(int64_t) * (size_t)tokens);
  for (int64_t t = 0; t < tokens; t++) {
    slots[t] = (int64_t)random_below((uint32_t)(pages * page_size) + 1) - 1;
    positions[t] = random_below((uint32_t)max_len);
  }
  const int64_t pool = (int64_t)pages * kv_heads * page_size * dim, row = (int64_t)kv_heads * dim;
  void *q = numbers(tokens * heads * dim, dtype, 0), *k = numbers(tokens * row, dtype, 0);
  void *v = numbers(tokens * row, dtype, 0), *k_pool = numbers(pool, dtype, 1), *v_pool = numbers(pool, dtype, 1);
  float *cos_sin = numbers((int64_t)max_len * rot, NM_F32, 0);
  struct nm_rope call = {q, k, v, k_pool, v_pool, positions, random_below(4) ? cos_sin : NULL,
                         random_below(4) ? slots : NULL, (int64_t)heads * dim, row, row, row * page_size, tokens, pages,
                         max_len, heads, kv_heads, dim, rot, page_size, dtype, 1, (int32_t)between(1, 4)};
  expect(nm_rope_store(&call), "nm_rope_store");
}

static void rows(int dtype) {
  const int64_t count = random_below(5), width = between(1, 90), vocab = between(1, 2100);
  void *gate_up = numbers(count * 2 * width, dtype, 0), *out = numbers(count * width, dtype, 1);
  for (int gate = 0; gate < 2; gate++)
    expect(nm_gated_mul(gate_up, out, count, width, 2 * width, dtype, gate, 3), "nm_gated_mul");
  void *logits = numbers(count * vocab, dtype, random_below(4) == 0);
  int32_t *ids = give(sizeof(int32_t) * (size_t)count);
  expect(nm_argmax(logits, ids, count, vocab, vocab, dtype, 3), "nm_argmax");
}

static void draws(int dtype) {
  const int64_t count = random_below(6), vocab = between(1, 900), gap = random_below(4);
  void *logits = numbers(count ? (count - 1) * (vocab + gap) + vocab : 0, dtype, random_below(8) == 0);
  const size_t n = (size_t)count;
  float *temperature = give(4 * n), *min_p = give(4 * n), *top_p = give(4 * n);
  int32_t *top_k = give(4 * n), *out = give(4 * n);
  int64_t *seed = give(8 * n), *position = give(8 * n);
  for (int64_t r = 0; r < count; r++) {
    temperature[r] = (float)random_below(4) * 0.5f;
    min_p[r] = random_below(2) ? 0.0f : (float)random_below(1001) / 1000.0f;
    top_p[r] = random_below(2) ? 1.0f : (float)random_below(1001) / 1000.0f;
    top_k[r] = random_below(2) ? 0 : (int32_t)random_below((uint32_t)vocab + 3);
    seed[r] = (int64_t)random_below(UINT32_MAX) << 32;
    position[r] = random_below(UINT32_MAX);
  }
  struct nm_draw call = {logits, out, temperature, min_p, top_k, top_p, seed, position, count, vocab, vocab + gap,
                         dtype, (int32_t)between(1, 4)};
  expect(nm_draw(&call), "nm_draw");
  for (int64_t r = 0; r < count; r++)
    if (out[r] < -1 || out[r] >= vocab) expect(-1, "a token outside the vocabulary");
}

static void linear_int8(int dtype) {
  const int64_t rows = random_below(random_below(8) ? 40 : 250), gap = random_below(4);
  const int64_t inputs = random_below(16) ? between(1, 300) : between(4000, 5000), outputs = between(1, 200);
  const int gate = (int)random_below(3) - 1;
  const int64_t columns = gate == NM_NO_GATE ? outputs : (outputs + 15) / 16 * 32;
  const int64_t padded = (columns + 63) / 64 * 64, units = (inputs + 31) / 32 * 8;
  uint8_t *panels = give((size_t)(padded * units * 4));
  for (int64_t i = 0; i < padded * units * 4; i++) panels[i] = (uint8_t)between(1, 255);
  struct nm_int8_layer layer = {.panels = panels, .scale = numbers(padded, NM_F32, 0),
                                .bias = numbers(padded, NM_F32, 0), .outputs = outputs, .inputs = inputs, .gate = gate};
  struct nm_int8_call call = {
      .layer = &layer, .x = numbers(rows ? (rows - 1) * (inputs + gap) + inputs : 0, dtype, random_below(8) == 0),
      .out = numbers(rows * outputs, dtype, 1), .x_stride = inputs + gap, .rows = rows, .dtype = dtype,
      .threads = (int32_t)between(1, 4)};
  expect(nm_linear_int8(&call), "nm_linear_int8");
}

static void linear(int dtype) {
  const int64_t outputs = between(1, 200), inputs = random_below(8) ? between(1, 90) : between(2000, 2300);
  const int64_t count = random_below(12) ? random_below(20) : between(190, 400), gap = random_below(4);
  struct nm_linear layer = {NULL, outputs, inputs, dtype, (int32_t)random_below(3) - 1, (int32_t)random_below(2)};
  const int64_t columns = layer.gate == NM_NO_GATE ? outputs : 2 * outputs;
  layer.packed = give((size_t)nm_linear_bytes(&layer));
  const void *weight = numbers((columns - 1) * (inputs + gap) + inputs, dtype, 0);
  const void *bias = layer.has_bias ? numbers(columns, dtype, 0) : NULL;
  expect(nm_linear_pack(&layer, weight, inputs + gap, bias, (int)between(1, 4)), "nm_linear_pack");
  const void *x = numbers(count ? (count - 1) * (inputs + gap) + inputs : 0, dtype, 0);
  void *out = numbers(count * outputs, dtype, 1);
  expect(nm_linear(&layer, x, inputs + gap, out, outputs, count, (int)between(1, 4)), "nm_linear");
  if (layer.gate != NM_NO_GATE) return;
  int64_t *rows = give(sizeof(int64_t) * (size_t)count);
  for (int64_t i = 0; i < count; i++) rows[i] = random_below((uint32_t)outputs);
  expect(nm_linear_rows(&layer, rows, count, 1, numbers(count * inputs, dtype, 1), 3), "nm_linear_rows");
}

// Rows of a random ascending index.
static int32_t *ascending(int64_t count, int64_t *kept) {
  int32_t *index = give(sizeof(int32_t) * (size_t)count);
  *kept = 0;
  for (int64_t i = 0; i < count; i++)
    if (random_below(2)) index[(*kept)++] = (int32_t)i;
  return index;
}

static void keep_rows(int dtype) {
  const int64_t rows = random_below(9), width = between(1, 70), gap = random_below(4), size = dtype == NM_BF16 ? 2 : 4;
  struct nm_keep call = {.x = numbers(rows ? (rows - 1) * (width + gap) + width : 0, dtype, 0), .rows = rows,
                         .width = width * size, .stride = (width + gap) * size};
  call.index = ascending(rows, &call.count);
  expect(nm_keep_rows(&call), "nm_keep_rows");
}

// A norm of every token, rows kept, and a norm of those, recorded for one row and replayed for others.
static void replay(int dtype) {
  const int64_t tokens = between(1, 9), width = between(1, 70), size = dtype == NM_BF16 ? 2 : 4;
  void *x = numbers(tokens * width, dtype, 0), *out = numbers(tokens * width, dtype, 1);
  struct nm_norm norm = {x, NULL, numbers(width, dtype, 0), out, 1, 1, width, width, width, dtype, 2, 1e-5f, 0.0f};
  struct nm_keep keep = {.x = out, .width = width * size, .stride = width * size};
  const struct nm_recorded recorded[] = {
      {NM_OP_RMS_NORM, &norm, NM_TOKENS}, {NM_OP_KEEP_ROWS, &keep, NM_DRAWN}, {NM_OP_RMS_NORM, &norm, NM_DRAWN}};
  struct nm_step step = {.num_tokens = tokens};
  step.drawn = ascending(tokens, &step.num_drawn);
  int64_t stopped_at;
  expect(nm_replay(recorded, 3, &step, &stopped_at), "nm_replay");
}

int main(int argc, char **argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 100;
  nm_set_parallel(team);
  for (int i = 0; i < rounds; i++) {
    const int dtype = i % 2;
    attention(dtype);
    take_back();
    norm(dtype);
    take_back();
    rope(dtype);
    take_back();
    rows(dtype);
    take_back();
    draws(dtype);
    take_back();
    linear(dtype);
    take_back();
    linear_int8(dtype);
    take_back();
    keep_rows(dtype);
    take_back();
    replay(dtype);
    take_back();
  }
  return 0;
}
