"""Discrete simulation of a schedule: costs in, a timeline out."""
