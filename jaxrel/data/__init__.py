"""From text to the batches of a run: corpora, tokenizers, Grain pipelines, data positions."""
