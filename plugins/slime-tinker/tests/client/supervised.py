"""The cookbook's supervised.train on conversations that come with it. supervised.py LOG"""

import asyncio
import sys
from pathlib import Path

import tinker_cookbook
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

if __name__ == "__main__":
    model = "Qwen/Qwen3-8B"
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model,
        renderer_name="qwen3",
        max_length=256,
        batch_size=4,
        train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    )
    file = Path(tinker_cookbook.__file__).parent / "example_data/conversations.jsonl"
    config = train.Config(
        log_path=sys.argv[1],
        model_name=model,
        recipe_name="supervised",
        renderer_name="qwen3",
        dataset_builder=FromConversationFileBuilder(common_config=common, file_path=str(file)),
        learning_rate=1e-2,
        lora_rank=8,
        eval_every=0,
        save_every=0,
        max_steps=4,
    )
    asyncio.run(train.main(config))
