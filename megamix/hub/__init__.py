"""Models in and out: Hugging Face folders, and text and perplexity from any model that lies on the disk.

links            which part of which Hugging Face tensor a parameter is
families         gpt2, llama, qwen2, qwen3: config.json and ModelConfig, tensor names and parameter names
stored_sizes     config.json's sizes against those of the tensors
hugging_face     a Hugging Face folder, read tensor by tensor
tokenizer_files  what belongs to a tokenizer, and which tokens end a text
import_model     a Hugging Face folder becomes a checkpoint that a run can begin from
export_model     a checkpoint becomes a Hugging Face folder
finite           weights that are NaN or inf, told by tensor
source           a model by its path: a run, a checkpoint, a Hugging Face folder
evaluate         perplexity of a token file
harness          lm-eval-harness on the export
verbs            what `megamix import`, `export`, `generate` and `evaluate` take and print
"""
