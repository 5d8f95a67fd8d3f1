//! One file per verb: its flags, and a function `run` that does it.

pub mod bench;
pub mod calibrate;
pub mod chat;
pub mod convert;
pub mod demo;
pub mod devices;
pub mod inspect;
pub mod logits;
pub mod perplexity;
pub mod plugin;
pub mod run;
pub mod synth;
pub mod tokenize;
pub mod verify;
