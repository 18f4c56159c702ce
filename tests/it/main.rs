//! The integration tests, one binary.

mod operator_table;
mod readme;
mod tidy;
