"""
GRPO by TRL, whose rollouts speculate: with a head that stays as it is, one that learns beside the policy, or none.

    python examples/grpo_rollouts.py --ways frozen online none --max-seconds 480 --output rollouts

The policy is rewarded for what it hardly writes by itself, so that its texts move away from those that the head was
trained on. Prints and draws, over the trainer's steps, how many tokens a step of the rollouts accepts; each way is a
run with the same seed, kept in the output folder, and those of earlier commands are in table and picture, too. Needs
TRL (`pip install 'hf-specdec[rl]'`).
"""

from __future__ import annotations

import json
import re
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import common
import torch
from transformers import AutoTokenizer, ContinuousBatchingConfig, TrainerCallback

import hf_specdec
from hf_specdec.benchmarking import prompts as prompt_sets


HEAD = Path(__file__).parents[1] / "model_cards" / "SmolLM2-135M-Instruct-EAGLE3"
WAYS = ("frozen", "online", "none")


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def share_of(characters: str, found: str) -> float:
    return sum(one in found for one in characters) / max(len(characters), 1)


def capitals(completions: list[Any], **_: Any) -> list[float]:
    """
    The mean of two shares: of capitals among the letters, and of 32 different words in capitals, without which a
    policy soon repeats itself, as any head foresees.
    """
    texts = list(map(text_of, completions))
    letters = ["".join(filter(str.isalpha, text)) for text in texts]
    words = [{word for word in re.findall(r"[A-Za-z]+", text) if len(word) > 1 and word.isupper()} for text in texts]
    shares = [share_of(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") for text in letters]
    return [(share + min(len(own), 32) / 32) / 2 for share, own in zip(shares, words, strict=True)]


def without_e(completions: list[Any], **_: Any) -> list[float]:
    """How few of the letters are e, of which English has an eighth."""
    letters = ["".join(filter(str.isalpha, text_of(one))).lower() for one in completions]
    return [1 - 8 * share_of(text, "e") if len(text) > 40 else 0.0 for text in letters]


def short_sentences(completions: list[Any], **_: Any) -> list[float]:
    """Sentences for each word."""
    return [sum(map(text_of(one).count, ".!?")) / max(len(text_of(one).split()), 8) for one in completions]


REWARDS = {"capitals": capitals, "without-e": without_e, "short-sentences": short_sentences}


class Watch(TrainerCallback):
    """Keeps what every step logs, and ends the run after so many seconds."""

    def __init__(self, metrics: list[hf_specdec.SpeculationMetrics] | None, seconds: float):
        self.metrics, self.seconds, self.start = metrics, seconds, time.perf_counter()
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is None or "reward" not in logs:
            return
        accepted = self.metrics[-1].mean_acceptance_length if self.metrics else 1.0
        self.steps.append(
            {
                "step": state.global_step,
                "accepted": accepted,
                "reward": float(logs["reward"]),
                "seconds": float(logs.get("step_time", 0.0)),
            }
        )
        print(f"step {state.global_step}: reward {logs['reward']:.3f}, {accepted:.2f} tokens a step", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= time.perf_counter() - self.start > self.seconds


def data(tokenizer: Any, repeats: int) -> Any:
    from datasets import Dataset

    prompts: list[Any] = [prompt.text for prompt in prompt_sets.built_in()]
    if tokenizer.chat_template:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return Dataset.from_dict({"prompt": prompts * repeats})


def block_size_name() -> str:
    """Transformers before 5.23 calls the option `block_size`."""
    return "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"


def run(way: str, options: Any) -> dict[str, Any]:
    """A run of one way: what its steps logged, and what the online head's steps cost."""
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(options.seed)
    model, tokenizer = common.load_target(options)
    model.requires_grad_(True)
    config = GRPOConfig(
        output_dir=str(Path(options.output) / "trainer"),
        use_cpu=options.device == "cpu",
        bf16=False,  # else TRL casts the policy itself, and small updates are rounded away
        tf32=options.device != "cpu" or None,
        per_device_train_batch_size=options.texts,
        num_generations=options.generations,
        max_completion_length=options.max_new_tokens,
        max_steps=options.steps,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        seed=options.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        use_transformers_continuous_batching=way != "none",
        transformers_continuous_batching_config={"num_blocks": options.texts * 40, block_size_name(): 16},
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=REWARDS[options.reward],
        args=config,
        train_dataset=data(tokenizer, 1 + options.steps * options.texts // options.generations // 27),
        processing_class=AutoTokenizer.from_pretrained(tokenizer.name_or_path, padding_side="left"),
    )
    head: Any = None
    if way != "none":
        head = hf_specdec.EagleHead.from_pretrained(options.draft).to(options.device)
    if way == "online":
        head = hf_specdec.OnlineHead(
            head,
            lr=options.head_lr,
            budget=options.budget,
            texts_per_step=options.head_texts,
            follow_vocabulary=not options.keep_vocabulary,
        )
    rollouts = None if head is None else hf_specdec.rollouts(model, head, tree=options.tree)
    watch = Watch(None if rollouts is None else rollouts.metrics, options.max_seconds)
    trainer.add_callback(watch)
    with rollouts or nullcontext():
        trainer.train()
    result: dict[str, Any] = {"way": way, "options": vars(options), "steps": watch.steps}
    if way == "online":
        head.save_pretrained(Path(options.output) / "head")
        share = head.seconds_learning / head.seconds_between
        result["learning"] = {"steps": head.num_steps, "share": share, "exchanged": head.num_exchanged}
    return result


def table(results: list[dict[str, Any]]) -> None:
    """Medians of the first and the last tenth of the steps."""
    print(f"\n{'way':8} {'steps':>6} {'accepted':>16} {'kept':>6} {'reward':>16} {'s per step':>11}")
    for result in results:
        steps = result["steps"]
        tenth = max(len(steps) // 10, 1)
        first, last = (
            {name: statistics.median(step[name] for step in end) for name in ("accepted", "reward")}
            for end in (steps[:tenth], steps[-tenth:])
        )
        print(
            f"{result['way']:8} {len(steps):6} {first['accepted']:7.2f} → {last['accepted']:6.2f} "
            f"{last['accepted'] / first['accepted']:6.0%} {first['reward']:7.3f} → {last['reward']:6.3f} "
            f"{statistics.median(step['seconds'] for step in steps):11.2f}"
        )
        if "learning" in result:
            learning = result["learning"]
            exchanged = f"{learning.get('exchanged', 0)} places of its vocabulary exchanged"
            print(f"{'':8} {learning['steps']} steps of the head, {learning['share']:.1%} of the time, {exchanged}")


def draw(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6))
    for result in results:
        steps = [step["step"] for step in result["steps"]]
        for axes, name in ((above, "accepted"), (below, "reward")):
            axes.plot(steps, [step[name] for step in result["steps"]], label=result["way"])
    above.set_ylabel("tokens per step of a text")
    below.set_ylabel("reward")
    below.set_xlabel("step of the trainer")
    above.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__, max_new_tokens=128)
    parser.add_argument("--draft", default=str(HEAD), help="Hub id or folder of an EAGLE-3 head")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["frozen", "online"])
    parser.add_argument("--output", default="rollouts")
    parser.add_argument("--reward", choices=REWARDS, default="capitals")
    parser.add_argument("--tree", default="chain:4")
    parser.add_argument("--texts", type=int, default=64, help="texts of a rollout")
    parser.add_argument("--generations", type=int, default=8, help="of which so many answer the same prompt")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--max-seconds", type=float, default=480, help="for each way")
    parser.add_argument("--lr", type=float, default=2e-5, help="learning rate of the policy")
    parser.add_argument("--head-lr", type=float, default=3e-4, help="learning rate of the online head")
    parser.add_argument("--head-texts", type=int, default=16, help="texts of each of its steps")
    parser.add_argument("--keep-vocabulary", action="store_true", help="its draft vocabulary stays as it is")
    parser.add_argument("--budget", type=float, default=0.05, help="share of the time in which the head learns")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    for way in options.ways:
        print(f"\n{way}")
        (folder / f"{way}.json").write_text(json.dumps(run(way, options)) + "\n")
    results = [json.loads(path.read_text()) for way in WAYS if (path := folder / f"{way}.json").is_file()]
    table(results)
    draw(results, folder / "rollouts.png")


if __name__ == "__main__":
    main()
