"""Models: configuration, weights, decoder, sampler and the runner that executes a StepPlan."""
