// The command `mounttest` of the Kubernetes project's image agnhost, which the suites of storage run in their pods. That
// image is in a registry that a node of the tests does not reach, and its other commands need half of a server's code.
package main

import (
	"os"

	"github.com/spf13/cobra"
	"k8s.io/kubernetes/test/images/agnhost/mounttest"
)

func main() {
	agnhost := &cobra.Command{Use: "agnhost"}
	agnhost.AddCommand(mounttest.CmdMounttest)
	if agnhost.Execute() != nil {
		os.Exit(1)
	}
}
