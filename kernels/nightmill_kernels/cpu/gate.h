// Gated activations, for whoever has a gate and what it gates in registers.
#ifndef NIGHTMILL_GATE_H
#define NIGHTMILL_GATE_H

#include "nightmill.h"
#include "vec.h"

// Both are g · sigmoid(z) · up: z = g for silu, z = 2·sqrt(2/π)·(g + 0.044715 g³) for gelu's tanh form.
INLINE vf gated(vf g, vf up, const int gate) {
  const vf z = gate == NM_SILU ? g : 1.5957691216057308f * (g + 0.044715f * g * g * g);
  return g / (1.0f + exp2_v(z * -LOG2E)) * up;
}

#endif
