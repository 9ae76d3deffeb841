"""Models on this machine: files, stages, vocabularies, samplers. The only package that imports `_native`."""
