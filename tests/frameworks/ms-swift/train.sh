NPROC_PER_NODE=1 swift sft --model "$MODEL" --model_type llama --template dummy --dataset "$DATA/messages.jsonl" \
    --deepspeed "$DS_CONFIG" --output_dir "$OUTPUT" --add_version false --tuner_type full --use_cpu true --bf16 true \
    --torch_dtype bfloat16 --max_length 64 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 \
    --learning_rate 1e-3 --max_steps 5 --logging_steps 1 --save_steps 5 --save_only_model true --split_dataset_ratio 0 \
    --dataloader_num_workers 0 --dataset_num_proc 1 --report_to none
