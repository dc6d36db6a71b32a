"""Operations of the decoder, one stem each: wrapper, kernels per device, torch reference."""
