//! Matrix products on the kernels, with weights and activations that are the same in every run.
