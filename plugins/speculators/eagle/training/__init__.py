"""Training of EAGLE-3 and EAGLE-3.1 heads: data that the target writes itself, training-time test, evaluation."""
