"""Ranks films for people: a tower of what a person has watched, and one of films."""

import equinox as eqx
import jax
import jax.numpy as jnp

import axonym as axn
from axonym import nn
from axonym.precision import mixed_precision


class Towers(eqx.Module):
    films: nn.Embedding
    people: nn.Embedding
    person: nn.MLP
    film: nn.MLP

    @staticmethod
    def init(Film, Person, Embed, Width, Shared, *, key):
        keys = jax.random.split(key, 4)
        return Towers(
            films=nn.Embedding.init(Film, Embed, key=keys[0]),
            people=nn.Embedding.init(Person, Embed, key=keys[1]),
            person=nn.MLP.init(Embed, Shared, width=Width, depth=3, key=keys[2]),
            film=nn.MLP.init(Embed, Shared, width=Width, depth=3, key=keys[3]),
        )

    def __call__(self, person, watched, offered):
        taste = self.person(self.people(person) + self.films(watched).mean("history"))
        return axn.dot(taste, self.film(self.films(offered)), axis="shared")


forward = mixed_precision("params=float32,compute=bfloat16,output=float32", Towers.__call__)


class Moments(eqx.Module):
    first: list[jax.Array]
    second: list[jax.Array]
    count: jax.Array


def leaves(tree):
    return jax.tree.leaves(tree)


def begin(key, *axes):
    model = Towers.init(*axes, key=key)
    arrays = leaves(eqx.filter(model, eqx.is_inexact_array))
    return model, Moments([jnp.zeros_like(x) for x in arrays], [jnp.zeros_like(x) for x in arrays], jnp.zeros((), int))


def loss(model, person, watched, offered, clicked):
    return nn.binary_cross_entropy_loss(forward(model, person, watched, offered), clicked).mean().scalar()


def adam(model, moments, gradients, rate=1e-3, b1=0.9, b2=0.999):
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    arrays, structure = jax.tree.flatten(params)
    found = leaves(gradients)
    count = moments.count + 1
    first = [b1 * m + (1 - b1) * g for m, g in zip(moments.first, found)]
    second = [b2 * v + (1 - b2) * g * g for v, g in zip(moments.second, found)]
    new = [
        x - rate * (m / (1 - b1**count)) / (jnp.sqrt(v / (1 - b2**count)) + 1e-8)
        for x, m, v in zip(arrays, first, second)
    ]
    return eqx.combine(jax.tree.unflatten(structure, new), rest), Moments(first, second, count)


def step(model, moments, person, watched, offered, clicked):
    value, gradients = axn.value_and_grad(loss)(model, person, watched, offered, clicked)
    model, moments = adam(model, moments, gradients)
    return model, moments, value
