// Drawing tokens, a row at a time: the same bits as reference/draw.py.
//
//   1. z = logit / temperature, and the largest z of every PIECE of tokens
//   2. cut = the lowest z that min-p, top-k and top-p keep, without a sort: see `kept_from`
//   3. the largest z + noise among those ≥ cut. Most pieces are passed over: when even the largest noise there is could
//      not lift the piece's best above the best so far, or when none of its random words is small enough to do it.
#include <stdlib.h>

#include "elementary.h"
#include "nightmill.h"

enum {
  PIECE = 4 * VW,  // tokens whose noise comes of one vector of Philox blocks
  NEAR = 8,        // top-p looks at z ≥ max - NEAR first
};

struct row {
  float *z;         // [whole pieces], -inf past the vocabulary
  float *top;       // [pieces] largest z
  uint32_t *key;    // [vocab] candidates of a filter, in an order of integers
  uint64_t *mass;   // [vocab] their weights
  int64_t vocab, pieces;
  float highest;
};

// ---------------------------------------------------------------- z

// False where the row has a NaN or no finite largest logit.
INLINE int scale_row(struct row *r, const void *logits, float temperature, const int bf16) {
  const vf by = splat(temperature);
  vf best = splat(-INFINITY);
  vi nan = {0};
  for (int64_t piece = 0; piece < r->pieces; piece++) {
    const int64_t first = piece * PIECE;
    vf top = splat(-INFINITY);
    for (int64_t i = first; i < first + PIECE; i += VW) {
      const int64_t left = r->vocab - i;
      const vf x = left >= VW  ? load(logits, i, bf16)
                   : left > 0 ? load_tail(logits, i, (int)left, -INFINITY, bf16)
                              : splat(-INFINITY);
      const vf z = x / by;
      nan |= z != z;
      top = vmax(z, top);
      store(r->z, i, z, 0);
    }
    r->top[piece] = hmax(top);
    best = vmax(top, best);
  }
  int any_nan = 0;
  for (int i = 0; i < VW; i++) any_nan |= nan[i];
  r->highest = hmax(best);
  return !any_nan && r->highest > -INFINITY && r->highest < INFINITY;
}

static int32_t first_highest(const struct row *r) {
  int64_t piece = 0;
  while (r->top[piece] != r->highest) piece++;
  for (int64_t i = piece * PIECE;; i++)
    if (r->z[i] == r->highest) return (int32_t)i;
}

// ---------------------------------------------------------------- filters

// Floats in the order of integers.
static uint32_t key_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

static float float_of(uint32_t key) {
  const uint32_t bits = key ^ (key >> 31 ? 0x80000000u : 0xffffffffu);
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Tokens with z ≥ low become candidates; returns how many.
static int64_t gather(struct row *r, float low) {
  int64_t count = 0;
  for (int64_t piece = 0; piece < r->pieces; piece++) {
    if (r->top[piece] < low) continue;
    const int64_t first = piece * PIECE, last = first + PIECE < r->vocab ? first + PIECE : r->vocab;
    for (int64_t i = first; i < last; i++) {
      r->key[count] = key_of(r->z[i]);
      count += r->z[i] >= low;
    }
  }
  return count;
}

// The lowest candidate with less than `target` above it, counted or (weighed) by mass; -inf where all have less.
static float kept_from(struct row *r, int64_t count, uint64_t target, int weighed) {
  uint64_t above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint64_t sums[256] = {0};
    for (int64_t i = 0; i < count; i++) sums[r->key[i] >> shift & 255] += weighed ? r->mass[i] : 1;
    int bin = 255;
    while (bin >= 0 && above + sums[bin] < target) above += sums[bin--];
    if (bin < 0) return -INFINITY;  // in the first round only: later ones look into a bin that reaches the target
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
      r->key[kept] = r->key[i];
      if (weighed) r->mass[kept] = r->mass[i];
      kept += (int)(r->key[i] >> shift & 255) == bin;
    }
    count = kept;
  }
  return float_of(r->key[0]);
}

// k pieces have a token no lower than the k-th best of the pieces' tops: there are at least k such tokens, and few more.
static float cut_k(struct row *r, int32_t top_k) {
  float low = -INFINITY;
  if (top_k <= r->pieces) {
    for (int64_t piece = 0; piece < r->pieces; piece++) r->key[piece] = key_of(r->top[piece]);
    low = kept_from(r, r->pieces, (uint64_t)top_k, 0);
  }
  return kept_from(r, gather(r, low), (uint64_t)top_k, 0);
}

// Sum of the weights of all z ≥ cut.
static uint64_t mass_from(const struct row *r, float cut) {
  uint64_t total = 0;
  for (int64_t piece = 0; piece < r->pieces; piece++) {
    if (r->top[piece] < cut) continue;
    for (int64_t i = piece * PIECE; i < (piece + 1) * PIECE; i += VW) {
      const vf z = load(r->z, i, 0);
      vi mantissa, shift;
      weight_v(z - r->highest, &mantissa, &shift);
      mantissa &= z >= splat(cut);
      for (int lane = 0; lane < VW; lane++) total += weight_of(mantissa[lane], shift[lane]);
    }
  }
  return total;
}

// Weights of the candidates; returns their sum.
static uint64_t weigh(struct row *r, int64_t count) {
  uint64_t total = 0;
  for (int64_t i = 0; i < count; i += VW) {
    float z[VW];
    const int64_t n = count - i < VW ? count - i : VW;
    for (int64_t lane = 0; lane < VW; lane++) z[lane] = lane < n ? float_of(r->key[i + lane]) : -INFINITY;
    vi mantissa, shift;
    weight_v(load(z, 0, 0) - r->highest, &mantissa, &shift);
    for (int64_t lane = 0; lane < n; lane++) total += r->mass[i + lane] = weight_of(mantissa[lane], shift[lane]);
  }
  return total;
}

static float cut_p(struct row *r, float cut, float top_p) {
  const double share = ceil((double)mass_from(r, cut) * (double)top_p);
  const uint64_t target = share < 1.0 ? 1 : (uint64_t)share;
  for (float reach = NEAR;; reach *= 2) {
    const float near = r->highest - reach, low = near > cut && reach < 64 ? near : cut;
    const int64_t count = gather(r, low);
    if (weigh(r, count) >= target || low == cut) return kept_from(r, count, target, 1);
  }
}

static float larger(float a, float b) { return a > b ? a : b; }

static float cut_of(struct row *r, const struct nm_draw *c, int64_t row) {
  float cut = -INFINITY;
  if (c->min_p[row] > 0.0f) cut = r->highest + log_v(splat(c->min_p[row]))[0];
  if (c->top_k[row] > 0 && c->top_k[row] < r->vocab) cut = larger(cut, cut_k(r, c->top_k[row]));
  if (c->top_p[row] < 1.0f) cut = larger(cut, cut_p(r, cut, c->top_p[row]));
  return cut;
}

// ---------------------------------------------------------------- draw

struct winner {
  float value;
  int64_t token;
};

static void contest(const struct row *r, int64_t piece, const vu words[4], float cut, struct winner *best) {
  uint32_t turned[4][VW], ordered[PIECE];
  memcpy(turned, words, sizeof turned);
  for (int i = 0; i < PIECE; i++) ordered[i] = turned[i % 4][i / 4];
  for (int i = 0; i < PIECE; i += VW) {
    vu word;
    memcpy(&word, ordered + i, sizeof word);
    const vf z = load(r->z, piece * PIECE + i, 0);
    const vf value = choose(z >= splat(cut), z + gumbel_v(word), splat(-INFINITY));
    if (hmax(value) < best->value) continue;
    for (int lane = 0; lane < VW; lane++) {
      const int64_t token = piece * PIECE + i + lane;
      if (value[lane] > best->value || (value[lane] == best->value && token < best->token))
        *best = (struct winner){value[lane], token};
    }
  }
}

// Random words above this cannot lift `top` to `best`: the noise of a word w is at most -log(w / 2^32).
static uint32_t word_limit(float best, float top) {
  // The slack covers the roundings of the noise and of the sum.
  const float needed = best - top - (0.01f + 1e-6f * (fabsf(top) + fabsf(best)));
  const int halvings = needed > 0.0f ? (int)(needed * 1.442695f) : 0;
  return halvings > 31 ? 1u : 0xffffffffu >> halvings;
}

static int32_t noisy_best(const struct row *r, const struct philox *philox, float cut) {
  vu words[4];
  struct winner best = {-INFINITY, INT32_MAX};
  const int64_t likeliest = first_highest(r) / PIECE;
  philox_v(philox, (uint32_t)(likeliest * VW), words);
  contest(r, likeliest, words, cut, &best);
  for (int64_t piece = 0; piece < r->pieces; piece++) {
    const float top = r->top[piece];
    if (top < cut || piece == likeliest) continue;
    if (best.value - top > MAX_GUMBEL + 0.01f + 1e-6f * (fabsf(top) + fabsf(best.value))) continue;
    philox_v(philox, (uint32_t)(piece * VW), words);
    const vu least = umin_v(umin_v(words[0], words[1]), umin_v(words[2], words[3]));
    const vi small = (vi)(least <= word_limit(best.value, top));
    int any = 0;
    for (int i = 0; i < VW; i++) any |= small[i];
    if (any) contest(r, piece, words, cut, &best);
  }
  return (int32_t)best.token;
}

static int32_t draw_row(struct row *r, const struct nm_draw *c, int64_t row) {
  const float temperature = c->temperature[row];
  const int is_greedy = !(temperature > 0.0f);
  const float by = is_greedy ? 1.0f : temperature;
  const int is_sound = c->dtype == NM_BF16 ? scale_row(r, (const uint16_t *)c->logits + row * c->stride, by, 1)
                                           : scale_row(r, (const float *)c->logits + row * c->stride, by, 0);
  if (!is_sound) return -1;
  if (is_greedy) return first_highest(r);
  const uint64_t seed = (uint64_t)c->seed[row], position = (uint64_t)c->position[row];
  const struct philox philox = {{(uint32_t)seed, (uint32_t)(seed >> 32)}, {(uint32_t)position, (uint32_t)(position >> 32)}};
  return noisy_best(r, &philox, cut_of(r, c, row));
}

struct drawing {
  const struct nm_draw *call;
  int has_memory;
};

static void draw_rows(int64_t first, int64_t last, void *data) {
  struct drawing *drawing = data;
  const struct nm_draw *c = drawing->call;
  struct row r = {.vocab = c->vocab, .pieces = (c->vocab + PIECE - 1) / PIECE};
  r.z = malloc(sizeof(float) * (size_t)(r.pieces * PIECE));
  r.top = malloc(sizeof(float) * (size_t)r.pieces);
  r.key = malloc(sizeof(uint32_t) * (size_t)r.vocab);
  r.mass = malloc(sizeof(uint64_t) * (size_t)r.vocab);
  if (r.z && r.top && r.key && r.mass)
    for (int64_t row = first; row < last; row++) c->out[row] = draw_row(&r, c, row);
  else
    __atomic_store_n(&drawing->has_memory, 0, __ATOMIC_RELAXED);
  free(r.mass);
  free(r.key);
  free(r.top);
  free(r.z);
}

int nm_draw(const struct nm_draw *c) {
  if ((c->dtype != NM_F32 && c->dtype != NM_BF16) || c->vocab < 1 || c->vocab > NM_MAX_VOCAB) return NM_UNSUPPORTED;
  struct drawing drawing = {c, 1};
  const int64_t grain = (c->rows + 4 * c->threads - 1) / (4 * c->threads);
  nm_for(c->rows, grain, c->threads, draw_rows, &drawing);
  return drawing.has_memory ? NM_OK : NM_NO_MEMORY;
}
