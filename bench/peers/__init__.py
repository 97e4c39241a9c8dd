"""What users would pick instead of Backburner, each as its documentation recommends, against the same fake provider."""
