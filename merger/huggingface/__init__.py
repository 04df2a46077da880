"""What makes the output a Hugging Face model directory: names, ties, expected tensors, side files."""
