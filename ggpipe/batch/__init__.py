"""Files of many prompts, and of their answers. (Not llama.cpp's batches, which are parts of a prompt.)"""
