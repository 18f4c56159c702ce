//! The integration tests, one binary.

mod aliasing;
mod autocast;
mod bad_input;
mod broadcast;
mod candle_methods;
mod cases;
mod checkpoint;
mod deep_graphs;
#[path = "../../src/kernels/testing/devices.rs"]
mod devices;
mod dtype_flow;
mod edges;
mod faults;
mod forgotten;
mod frozen;
mod golden;
mod gradients;
mod graph;
mod graph_release;
mod handed_out;
mod histogram;
mod instructions;
mod layers;
mod losses;
mod master_vars;
mod master_weights;
mod misuse;
mod modules;
mod multi_optimizer;
mod nested;
mod operator_table;
mod optim;
mod overflow;
mod padded_sequences;
mod parallel;
mod pending_gradients;
mod pointwise;
mod products;
mod profile;
mod public_api;
mod random_graphs;
#[path = "../ranks/mod.rs"]
mod ranks;
mod readable_errors;
mod readme;
mod saved_tensors;
mod saving;
mod scale_rule;
mod scaler;
mod sequence;
mod sequential;
mod zero_grad;

mod sgd;
mod statistics;
mod threads;
mod tidy;
mod trace;
mod transformer;
mod util;
mod versions;

mod workers;
mod wrapper;
