#!/usr/bin/env bash
# Runs a program with address sanitizer loaded before all else, as kernels built with it need it.
export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}
LD_PRELOAD=$(g++ -print-file-name=libasan.so) exec "$@"
