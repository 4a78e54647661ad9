"""Fine-tune a model of a Hugging Face folder, layer by layer.

    pip install ".[hf]"
    python examples/finetune_hf --checkpoint Qwen3-4B --text mine.txt --output mine
    python examples/finetune_hf --help

All parameters are trained, and what comes out is a folder like the one that went in.
`--method lora` trains adapters beside frozen weights, and writes them as PEFT does;
`--merge` adds them to the weights. `--method qlora` has these weights in four bits. Its
adapters are learned beside what four bits keep of the weights; both losses are printed.
The moments are in host memory, in eight bits where the weights are in bfloat16, and
with `--way host` or `all` the weights too. `--devices 8` divides all of it.

Ctrl-C and SIGTERM save what has been done, and say how to go on: `--resume` continues
bit for bit.
"""
