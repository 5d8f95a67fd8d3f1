//! Cpu.
