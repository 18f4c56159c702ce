//! The integration tests, one binary.

mod tidy;
