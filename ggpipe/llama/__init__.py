"""libllama inside this process: models, stages, vocabularies, sampling, grammars."""
