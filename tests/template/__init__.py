"""The shipped template held to rules that neither CloudFormation nor cfn-lint checks."""
