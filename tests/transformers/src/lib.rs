//! Models of candle-transformers, as they are, under `MasterVars`: which train, and which do not
//! and why.

#![cfg(test)]

mod harness;
mod text;
mod vision;
