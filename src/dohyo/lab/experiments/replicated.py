"""Runs that may be several, with seeds of their own: replicas, in one program where that is possible."""

import dataclasses
import math
import statistics
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from lightning_fabric import Fabric
from torch import nn

from dohyo.errors import DohyoError
from dohyo.files import plain
from dohyo.lab.experiments.run import C, OnEpoch, OnTest, Run
from dohyo.lab.fast.stacked import Unbatchable
from dohyo.lab.fast.together import Replica, choose_for, train_together
from dohyo.lab.folder import replica_folder, write_result
from dohyo.lab.training.loop import Diverged


class ReplicatedRun(Run[C]):
    """A run, or one that is made of several, each in a folder of its own."""

    outcomes: ClassVar[tuple[str, ...]]  # the numbers of a result whose spread over the replicas is given, the main one first

    def __init__(self, folder: Path, config: C, of: "Self | None" = None) -> None:
        super().__init__(folder, config)
        self.of = of  # the replicated run that this one is a part of

    def replica_configs(self) -> list[Any]:
        """The replicas' configs, which differ in the seed."""
        config: Any = self.config
        k_seed = config.seed if config.k_seed is None else config.k_seed
        return [dataclasses.replace(config, k_seed=k_seed, replicas=1, seed=config.seed + i) for i in range(config.replicas)]

    @cached_property
    def replicas(self) -> list[Self]:
        """The runs of a replicated run; empty if there is only one run."""
        config: Any = self.config
        if config.replicas == 1:
            return []
        return [type(self)(replica_folder(self.folder, i), config, self) for i, config in enumerate(self.replica_configs())]

    @property
    def finished(self) -> bool:
        if not self.replicas:
            return super().finished
        result = self.result
        if result is None or not all(replica.finished for replica in self.replicas):
            return False
        return result.get("replicas") == [replica.result for replica in self.replicas]  # else one was trained further

    def trained(self, average: bool = False) -> nn.Module:
        if self.replicas:
            raise DohyoError(f"{self.folder} holds {len(self.replicas)} replicas; name one of them: {self.replicas[0].folder}")
        return super().trained(average)

    @property
    def folders(self) -> list[Path]:
        return [self.folder, *(replica.folder for replica in self.replicas)]

    def _train(self, fabric: Fabric, on_epoch: OnEpoch, on_test: OnTest) -> dict[str, Any]:
        if not self.replicas:
            return super()._train(fabric, lambda record: on_epoch({**record, "notices": not_captured(record)}), on_test)
        if fabric.is_global_zero:
            self.write_config()
        serial, lost = [], {}
        try:
            self._train_together(fabric, on_epoch)
        except Unbatchable as error:
            serial = [f"the replicas run one after the other: {error}"]
        except Diverged as error:
            lost = dict.fromkeys(error.places, str(error))
        results = []
        for number, replica in enumerate(self.replicas):
            if number in lost:
                continue

            def note(record: dict[str, Any], number: int = number) -> None:
                on_epoch({**record, "replica": number, "notices": [*serial, *record["notices"]]})

            try:
                results.append(replica.complete(fabric, note, on_test))
            except Diverged as error:
                lost[number] = str(error)
        if lost:
            done = [str(replica.folder) for number, replica in enumerate(self.replicas) if number not in lost]
            others = f"; the others are finished, in {', '.join(done)}" if done else ""
            raise Diverged("; ".join(dict.fromkeys(lost.values())) + others, list(lost))
        result: dict[str, Any] = plain(self.joined(results))
        result["warnings"] = [*serial, *result["warnings"]]
        result["seconds"] = (sum if serial else max)(one["seconds"] for one in results)
        if fabric.is_global_zero:
            write_result(self.folder, result)
        return result

    def _train_together(self, fabric: Fabric, on_epoch: OnEpoch) -> None:
        """Train the replicas that are not finished, in one program."""
        members, pending = [], []
        for number, replica in enumerate(self.replicas):
            model, task, _ = replica.parts
            members.append(Replica(model, task, replica.config, replica.folder))
            if not replica.finished:
                pending.append(number)
        if len(pending) < 2:
            choose_for(members, self.replicas[0].parts[2], fabric)  # only to find out whether they can be trained together
            return
        if fabric.is_global_zero:
            for number in pending:
                self.replicas[number].write_config()
        objective = self.replicas[pending[0]].parts[2]
        try:
            for place, record in train_together([members[number] for number in pending], objective, fabric):
                on_epoch({**record, "replica": pending[place], "notices": not_captured(record)})
        except Diverged as error:
            raise Diverged(str(error), [pending[place] for place in error.places]) from error

    def joined(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """The mean of every number that differs between replicas, with the spread of the outcomes, and the replicas."""
        spreads: dict[str, float | None] = {}
        for name in self.outcomes:
            if all(name in result for result in results):
                found = [result[name] for result in results]
                spread = statistics.stdev(found) if None not in found else None
                spreads[f"{name}_spread"] = spread
                spreads[f"{name}_mean_stderr"] = None if spread is None else spread / math.sqrt(len(found))
        own = {"seed": self.config.seed, "warnings": sorted({line for result in results for line in result.get("warnings", ())})}
        for key in ("verdict", "verdict_annealed"):
            if verdicts := [result[key] for result in results if result.get(key)]:
                own[key] = min(verdicts, key=lambda verdict: (False, None, True).index(verdict["trusted"]))  # the worst
        return {**_mean(results), **own, **spreads, "replicas": results}


def _mean(values: list[Any]) -> Any:
    """The mean of numbers, also inside of dicts; of anything else the first."""
    first = values[0]
    if isinstance(first, dict) and all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _mean([value[key] for value in values]) for key in first}
    if isinstance(first, bool):
        return any(values)  # such as whether a run has diverged
    is_number = isinstance(first, float | int) and None not in values
    return statistics.fmean(values) if is_number and len(set(values)) > 1 else first


def not_captured(record: dict[str, Any]) -> list[str]:
    """A notice if the faster program was wanted for this record and could not be used."""
    _, _, reason = record.get("program", "").partition("plain: ")
    return [f"the step is not captured: {reason}"] if reason else []
